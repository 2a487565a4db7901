"""The mean over all clients of a round, also over those that do not hold a cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fedquilt.errors import ConfigError
from fedquilt.federation.aggregation.mean import accumulate, move_rings
from fedquilt.federation.aggregation.parts import Aggregate, Aggregator, RingSums
from fedquilt.federation.client import Update
from fedquilt.federation.constants import keep_constants
from fedquilt.federation.state import Setup, State


@dataclass(frozen=True)
class FullMean(Aggregator):
    """The mean of every cell over all updates; where one does not hold it, the server's value.

    For cell c, the set S_c of updates whose subnet contains c, and all updates S,

        w_c <- w_c + Σ_{u in S_c} a_u (w_{u,c} - w_c) / Σ_{u in S} a_u.

    So a cell that few clients hold moves by their share only. This is how APFL writes its average
    (Algorithm 3: line 5 masks the gradient, line 10 averages over all clients of the round).

    >>> import fedquilt as fq
    >>> fq.HeteroFL(aggregator=fq.FullMean()).aggregator
    FullMean()
    """

    def replaced_by(self, rule: Aggregator) -> Aggregator:
        """The rule itself."""
        return rule

    def aggregate(self, setup: Setup, state: State, updates: Iterable[Update]) -> Aggregate:
        """Averages the updates as they come; their sum of weights is known in the end."""
        total = 0.0

        def note_weights() -> Iterator[Update]:
            nonlocal total
            for update in updates:
                total += update.weight
                yield update

        mean = accumulate(state.params, setup.structure, note_weights())
        params = mean.result()
        for name, new in params.items():
            old = state.params.get(name, state.params[name.partition("@")[0]])
            if new is old or not new.is_floating_point() or not total:
                continue
            share = (mean.held_weight(name) / total).to(new.dtype)
            params[name] = keep_constants(torch.lerp(old, new, share), old)
        return Aggregate(params, mean.trained)

    def aggregate_sums(self, setup: Setup, state: State, sums: RingSums) -> Aggregate:
        """The same from sums; the weight of all is that of the ring which all clients hold."""
        total = 0.0 if sums.rings.common is None else sums.weights.get(sums.rings.common, 0.0)
        if not total:
            raise ConfigError(
                "the full mean of secure sums needs cells that all clients of a round hold, and "
                "there are none; merge by the mean over holders: aggregation.name = 'holder-mean'"
            )
        changes = {ring: change / total for ring, change in sums.changes.items()}
        return move_rings(setup, state, sums.rings, changes)
