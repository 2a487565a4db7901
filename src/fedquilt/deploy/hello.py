"""What a client says about itself when the server asks."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fedquilt.deploy.site import Site
from fedquilt.engines.flower.letters import SETTINGS, problem_of
from fedquilt.errors import TrainingError
from fedquilt.federation.client import Client
from fedquilt.training.plain import as_plain, from_plain

MOST_DIMS = 8


@dataclass(frozen=True)
class Hello:
    """A client as the server sees it: no example of its data, but what one would look like."""

    client: Client
    has_tests: bool
    num_classes: int
    num_tokens: int | None
    shape: tuple[int, ...]  # of one input
    dtype: str
    is_own: bool = False  # its data are no part of the set that the settings name

    @staticmethod
    def of(site: Site) -> Hello:
        """What a node says."""
        return Hello(
            site.client,
            site.has_tests,
            site.num_classes,
            site.num_tokens,
            tuple(site.example.shape[1:]),
            str(site.example.dtype).removeprefix("torch."),
            site.is_own,
        )

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
                        "tests": self.has_tests,
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
        """What was sent; raises a TrainingError if that makes no sense."""
        problem = problem_of(content)
        if problem is not None:
            raise TrainingError(problem)
        try:
            words = content.config_records[SETTINGS]
            shape = tuple(int(size) for size in json.loads(str(words["shape"])))
            dtype = str(words["dtype"])
            if len(shape) > MOST_DIMS or not isinstance(getattr(torch, dtype), torch.dtype):
                raise ValueError(f"inputs of {dtype} {shape}")
            client = Client(
                int(words["client"]),  # type: ignore[arg-type]
                int(words["examples"]),  # type: ignore[arg-type]
                tuple(int(label) for label in json.loads(str(words["labels"]))),
                from_plain(json.loads(str(words["budget"]))),
                str(words["group"]),
            )
            return Hello(
                client,
                bool(words["tests"]),
                int(words["classes"]),  # type: ignore[arg-type]
                int(words["tokens"]) or None,  # type: ignore[arg-type]
                shape,
                dtype,
                bool(words["own"]),
            )
        except Exception as problem:  # whatever a foreign message may do to those who read it
            raise TrainingError(
                f"a node said what cannot be read ({type(problem).__name__}: {problem})"
            ) from problem
