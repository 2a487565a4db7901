"""What a client's update is as integers, ring by ring, and what their sums say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedquilt.errors import ProtocolError, UpdateError
from fedquilt.federation.client import client_label, derive_seed
from fedquilt.federation.rings import Rings
from fedquilt.federation.secure.integers import Integers
from fedquilt.federation.secure.quantization import NUM_EXTRA, Quantizer, RingSum
from fedquilt.structure.cut import Params
from fedquilt.structure.subnet import Subnet

MAX_LOSS = 100.0  # the largest training loss that is summed as such
REPORT_SIZE = 1 + NUM_EXTRA  # integers of a report: the training loss, and what comes with a ring


def encode_change(
    rings: Rings,
    subnets: Sequence[Subnet],
    before: Sequence[Params],
    after: Sequence[Params],
    quantizer: Quantizer,
    *,
    client: int,
    weight: float,
    seed: int,
) -> dict[int, Integers]:
    """The integers of one client for each of its rings.

    Cells that are not finite before, such as the -inf of a mask, do not change.

    Args:
        rings: The rings of the round.
        subnets: What the client sends.
        before: The tensors of each subnet as the client received them.
        after: The same after its work.
        quantizer: What makes integers of changes.
        client: Its number.
        weight: How much it counts.
        seed: Of stochastic rounding.

    Raises:
        UpdateError: A value is not finite.
    """
    old, new = rings.gather(subnets, before), rings.gather(subnets, after)
    encoded = {}
    for ring, values in new.items():
        change = torch.where(old[ring].isfinite(), values.double() - old[ring].double(), 0.0)
        if not bool(change.isfinite().all()):
            raise UpdateError(
                f"{client_label(client)} has values that are not finite; its training diverged"
            )
        encoded[ring] = quantizer.encode(change.numpy(), weight, derive_seed(seed, ring))
    return encoded


def make_report_quantizer(quantizer: Quantizer) -> Quantizer:
    """What makes an integer of a training loss; every client counts once."""
    return Quantizer(MAX_LOSS, 1.0, quantizer.num_clients, "nearest", quantizer.bits)


def encode_report(loss: float | None, quantizer: Quantizer) -> Integers:
    """The integers of one client's training loss; it weighs nothing if it is no finite number."""
    is_known = loss is not None and math.isfinite(loss)
    return make_report_quantizer(quantizer).encode(
        np.array([loss if is_known else 0.0], float), float(is_known), seed=0
    )


def split_report(total: Integers) -> tuple[Integers, Integers]:
    """The sum of a ring without the reports behind it, and the sum of the reports."""
    return total[:-REPORT_SIZE], total[-REPORT_SIZE:]


def decode_sums(
    quantizer: Quantizer, totals: Mapping[int, Integers], counts: Mapping[int, int]
) -> tuple[dict[int, RingSum], dict[int, str]]:
    """What the sums of some rings say, and why others cannot be used.

    Args:
        quantizer: What the clients have used.
        totals: The sums of integers by ring.
        counts: How many clients each of them is of.
    """
    sums, unusable = {}, {}
    for ring, total in totals.items():
        try:
            sums[ring] = quantizer.decode(total, counts[ring])
        except ProtocolError as problem:
            unusable[ring] = str(problem)
    return sums, unusable
