"""What a node tells the server about its client."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from fedquilt.deploy.node_context import NodeContext
from fedquilt.engines.flower.codec import DTYPES, SETTINGS, check_size, decode_error
from fedquilt.errors import ConfigError, FedquiltError, TrainingError, UpdateError
from fedquilt.federation.client import Client
from fedquilt.federation.privacy.settings import hide_data
from fedquilt.federation.validation import MAX_CLASSES, shorten, validate_client
from fedquilt.settings.schema import Config
from fedquilt.training.serialization import from_plain, to_plain

MAX_DIMS, MAX_INPUT_SIZE = 8, 10**8  # of one input
MAX_BYTES = 2**22  # of the whole message; a client may have many labels
FIELDS = {
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
class NodeInfo:
    """A client as the server knows it: no example of its data, but the shape and type of one."""

    client: Client
    num_classes: int
    num_tokens: int | None
    shape: tuple[int, ...]  # of one input
    dtype: str
    has_own_data: bool = False  # its data are not from the dataset that the settings name

    @staticmethod
    def from_context(node: NodeContext) -> NodeInfo:
        """Makes the information about a node."""
        return NodeInfo(
            replace(node.client, num_tests=node.num_tests),
            node.num_classes,
            node.num_tokens,
            tuple(node.example.shape[1:]),
            str(node.example.dtype).removeprefix("torch."),
            node.has_own_data,
        )

    def hide_data(self, config: Config) -> NodeInfo:
        """The information for a private run: nothing that depends on the client's examples."""
        num_classes = self.num_classes
        if self.has_own_data:
            stated = (config.model.model_extra or {}).get("num_classes")
            if not isinstance(stated, int):
                raise ConfigError(
                    "clients of a private run do not tell which classes they have; set "
                    "model.num_classes"
                )
            num_classes = stated
        return replace(self, client=hide_data(self.client), num_classes=num_classes)

    @property
    def has_tests(self) -> bool:
        """Whether it has its own test data."""
        return bool(self.client.num_tests)

    @property
    def input_spec(self) -> str:
        """The type and shape of its inputs."""
        tokens = f" of {self.num_tokens} tokens" if self.num_tokens else ""
        return f"{self.dtype} {self.shape}{tokens}"

    @property
    def example(self) -> Tensor:
        """An input of zeros, of the client's shape and type."""
        return torch.zeros((1, *self.shape), dtype=getattr(torch, self.dtype))

    def to_message(self) -> RecordDict:
        """Encodes the information as a message."""
        client = self.client
        return RecordDict(
            {
                SETTINGS: ConfigRecord(
                    {
                        "client": client.id,
                        "examples": client.num_examples,
                        "labels": json.dumps(client.labels),
                        "budget": json.dumps(to_plain(client.budget)),
                        "group": client.group,
                        "tests": client.num_tests or 0,
                        "classes": self.num_classes,
                        "tokens": self.num_tokens or 0,
                        "shape": json.dumps(self.shape),
                        "dtype": self.dtype,
                        "own": self.has_own_data,
                    }
                )
            }
        )

    @staticmethod
    def from_message(content: RecordDict) -> NodeInfo:
        """Decodes a message; raises a TrainingError if its values are not plausible."""
        try:
            check_size(content, MAX_BYTES)
            error = decode_error(content)
            if error is not None:
                raise UpdateError(error)
            info = _parse_fields(content.config_records[SETTINGS])
            validate_client(info.client, info.num_classes)
            info._check_inputs()
        except FedquiltError as problem:
            raise TrainingError(shorten(str(problem))) from problem
        except Exception as problem:  # an untrusted message may raise anything while it is read
            reason = f"a node sent an unreadable reply ({type(problem).__name__}: {problem})"
            raise TrainingError(shorten(reason)) from problem
        return info

    def _check_inputs(self) -> None:
        """Raises an UpdateError for implausible inputs, before memory is allocated for one."""
        if len(self.shape) > MAX_DIMS or self.dtype not in DTYPES or min(self.shape, default=1) < 1:
            raise UpdateError(f"inputs of {self.dtype!r:.60} {self.shape!r:.60} are not supported")
        if math.prod(self.shape) > MAX_INPUT_SIZE:
            raise UpdateError(
                f"an input may have at most {MAX_INPUT_SIZE:,} values, got {self.shape!r:.60}"
            )
        if not 0 <= (self.num_tokens or 0) <= MAX_CLASSES:
            raise UpdateError(f"there may be at most {MAX_CLASSES:,} tokens, got {self.num_tokens}")


def _parse_fields(record: ConfigRecord) -> NodeInfo:
    """Checks the names and types of fields; their values are checked later."""
    if set(record) != set(FIELDS):
        raise UpdateError(f"a node sends {', '.join(FIELDS)}, got {sorted(record)!r:.100}")
    for name, kind in FIELDS.items():
        if type(record[name]) is not kind:
            raise UpdateError(f"'{name}' must be {kind.__name__}, got {record[name]!r:.60}")
    fields: dict[str, Any] = dict(record)
    client = Client(
        fields["client"],
        fields["examples"],
        _parse_integers(fields["labels"]),
        from_plain(json.loads(fields["budget"])),
        fields["group"],
        fields["tests"],
    )
    return NodeInfo(
        client,
        fields["classes"],
        fields["tokens"] or None,
        _parse_integers(fields["shape"]),
        fields["dtype"],
        fields["own"],
    )


def _parse_integers(text: str) -> tuple[int, ...]:
    numbers = json.loads(text)
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise UpdateError(f"a list of integers is required, got {text:.60}")
    return tuple(numbers)
