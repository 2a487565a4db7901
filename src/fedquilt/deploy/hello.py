"""What a client says about itself when the server asks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fedquilt.deploy.site import Site
from fedquilt.engines.flower.letters import DTYPES, SETTINGS, check_size, problem_of
from fedquilt.errors import FedquiltError, TrainingError, UpdateError
from fedquilt.federation.boundary import MOST_CLASSES, check_client, shortened
from fedquilt.federation.client import Client
from fedquilt.training.plain import as_plain, from_plain

MOST_DIMS, MOST_NUMBERS = 8, 10**8  # of one input
MOST_BYTES = 2**22  # of what a node says: the numbers of many labels
WORDS = {
    "client": int,
    "examples": int,
    "labels": str,
    "budget": str,
    "group": str,
    "tests": int,
    "classes": int,
    "tokens": int,
    "shape": str,
    "dtype": str,
    "own": bool,
}


@dataclass(frozen=True)
class Hello:
    """A client as the server sees it: no example of its data, but what one would look like."""

    client: Client
    num_classes: int
    num_tokens: int | None
    shape: tuple[int, ...]  # of one input
    dtype: str
    is_own: bool = False  # its data are no part of the set that the settings name

    @staticmethod
    def of(site: Site) -> Hello:
        """What a node says."""
        return Hello(
            replace(site.client, num_tests=site.num_tests),
            site.num_classes,
            site.num_tokens,
            tuple(site.example.shape[1:]),
            str(site.example.dtype).removeprefix("torch."),
            site.is_own,
        )

    @property
    def has_tests(self) -> bool:
        """Whether it has test data of its own."""
        return bool(self.client.num_tests)

    @property
    def look(self) -> str:
        """What its inputs are."""
        tokens = f" of {self.num_tokens} tokens" if self.num_tokens else ""
        return f"{self.dtype} {self.shape}{tokens}"

    @property
    def example(self) -> Tensor:
        """An input like the client's."""
        return torch.zeros((1, *self.shape), dtype=getattr(torch, self.dtype))

    def content(self) -> RecordDict:
        """As it is sent."""
        client = self.client
        return RecordDict(
            {
                SETTINGS: ConfigRecord(
                    {
                        "client": client.id,
                        "examples": client.num_examples,
                        "labels": json.dumps(client.labels),
                        "budget": json.dumps(as_plain(client.budget)),
                        "group": client.group,
                        "tests": client.num_tests or 0,
                        "classes": self.num_classes,
                        "tokens": self.num_tokens or 0,
                        "shape": json.dumps(self.shape),
                        "dtype": self.dtype,
                        "own": self.is_own,
                    }
                )
            }
        )

    @staticmethod
    def read(content: RecordDict) -> Hello:
        """What was sent; raises a TrainingError if nobody could be so."""
        try:
            check_size(content, MOST_BYTES)
            problem = problem_of(content)
            if problem is not None:
                raise UpdateError(problem)
            hello = _read(content.config_records[SETTINGS])
            check_client(hello.client, hello.num_classes)
            hello._check_inputs()
        except FedquiltError as problem:
            raise TrainingError(shortened(str(problem))) from problem
        except Exception as problem:  # whatever a foreign message may do to those who read it
            said = f"a node said what cannot be read ({type(problem).__name__}: {problem})"
            raise TrainingError(shortened(said)) from problem
        return hello

    def _check_inputs(self) -> None:
        """Refuses inputs that no model of ours could have, before there is room made for one."""
        if (
            len(self.shape) > MOST_DIMS
            or self.dtype not in DTYPES
            or min(self.shape, default=1) < 1
        ):
            raise UpdateError(f"inputs of {self.dtype!r:.60} {self.shape!r:.60} are none")
        if math.prod(self.shape) > MOST_NUMBERS:
            raise UpdateError(
                f"an input has at most {MOST_NUMBERS:,} numbers, got {self.shape!r:.60}"
            )
        if not 0 <= (self.num_tokens or 0) <= MOST_CLASSES:
            raise UpdateError(f"there are at most {MOST_CLASSES:,} tokens, got {self.num_tokens}")


def _read(words: ConfigRecord) -> Hello:
    """The words of a message by their names and kinds; what they mean is looked at later."""
    if set(words) != set(WORDS):
        raise UpdateError(f"a node says {', '.join(WORDS)}, got {sorted(words)!r:.100}")
    for name, kind in WORDS.items():
        if type(words[name]) is not kind:
            raise UpdateError(f"'{name}' is {kind.__name__}, got {words[name]!r:.60}")
    told: dict[str, Any] = dict(words)
    client = Client(
        told["client"],
        told["examples"],
        _whole_numbers(told["labels"]),
        from_plain(json.loads(told["budget"])),
        told["group"],
        told["tests"],
    )
    return Hello(
        client,
        told["classes"],
        told["tokens"] or None,
        _whole_numbers(told["shape"]),
        told["dtype"],
        told["own"],
    )


def _whole_numbers(text: str) -> tuple[int, ...]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(type(number) is int for number in found):
        raise UpdateError(f"whole numbers were expected, got {text:.60}")
    return tuple(found)
