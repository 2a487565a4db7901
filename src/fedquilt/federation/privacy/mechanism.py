"""The private mean: changes of bounded norm, noise on their sum, a denominator that is public.

For client k let Δ_k be its change of the global model, zero in cells that it does not hold. With
C = clip, σ = noise_multiplier, q = rate and n_c registered clients that hold cell c,

    w_c <- w_c + (Σ_k Δ_k min(1, C / ‖Δ_k‖) + N(0, σ²C²))_c / (q n_c).

Whatever the widths, one client moves the sum by at most C. The denominator is the expected number
of holders, so it does not tell who answered. Cells that no registered client holds keep their
value. With ``per_ring`` the norm is bounded in each ring of cells, C_g = C √(share of its cells):
the noise is the same, and a client that holds few rings moves the sum by less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquilt.errors import ConfigError, StructureError, UpdateError
from fedquilt.federation.aggregation.parts import (
    Aggregate,
    Aggregator,
    RingSums,
    ServerUpdate,
    Validator,
)
from fedquilt.federation.client import SERVER, Update, client_label
from fedquilt.federation.privacy.noise import digest_tensors, draw_noise, draw_normal
from fedquilt.federation.rings import Holding, Rings, find_rings
from fedquilt.federation.state import Setup, State
from fedquilt.structure.tensors import named_tensors

Population = Mapping[Holding, int]  # registered clients by what they hold in a round
CountHoldings = Callable[[Setup, State], Population]

MEMORY = "privacy"  # in a state's memory: the clipping norm and the noise of the run
WITHIN = "within_clip"  # a client's metric: whether its change was not clipped
MAX_HOLDINGS = 4096  # different ones in a round; more would make a ring of nearly every cell


def list_noised(setup: Setup) -> frozenset[str]:
    """The tensors that training moves: weights and running statistics; others stay as they are."""
    weights = {name for name, weight in setup.model.named_parameters() if weight.requires_grad}
    tensors = named_tensors(setup.model)
    moved = weights | set(setup.structure.statistics)
    return frozenset(name for name in moved if tensors[name].is_floating_point())


def find_public_rings(setup: Setup, population: Population) -> Rings:
    """The rings of all registered clients, whoever is in the cohort."""
    if len(population) > MAX_HOLDINGS:
        raise ConfigError(
            f"public denominators need clients that share subnets, and there are "
            f"{len(population)} different ones in a round; choose a method that gives the same "
            "subnet to many clients"
        )
    try:
        return find_rings(setup.structure, population, list_noised(setup))
    except StructureError as problem:
        raise ConfigError(f"privacy cannot bound this method's updates: {problem}") from problem


def share_clip(rings: Rings) -> tuple[float, ...]:
    """C_g / C of every ring: the root of its share of the cells that are held."""
    held = sum(ring.num_cells for ring in rings if ring.holders)
    return tuple(math.sqrt(ring.num_cells / max(held, 1)) for ring in rings)


@dataclass(frozen=True)
class RequireWholeReply(Validator):
    """Rejects updates of other cells than the registered clients' subnets have.

    Args:
        holdings: Counts what registered clients hold in a round.
    """

    holdings: CountHoldings

    def validate(self, setup: Setup, state: State, update: Update) -> None:
        """Cells that are left out would tell of the client's data."""
        if tuple(update.subnets) not in self.holdings(setup, state):
            raise UpdateError(
                f"{client_label(update.client)} left out cells of its subnet, which would tell of "
                "its data"
            )


@dataclass(frozen=True)
class PrivateMean(Aggregator):
    """The noisy sum of clipped changes, divided by the expected number of holders.

    Args:
        holdings: Counts what registered clients hold in a round, whoever is in the cohort.
        rate: q, the probability that a client is in a cohort.
        secret: What noise is computed from.
        per_ring: Whether the norm is bounded in each ring of cells.
        count_noise: With adaptive clipping, σ_b of the count that is released as well.
        is_local: Whether clients have clipped their changes and added noise themselves.
        over_all: Whether sums are divided by the expected size of a cohort, as ``FullMean`` does.
    """

    holdings: CountHoldings
    rate: float
    secret: bytes = field(repr=False)
    per_ring: bool = False
    count_noise: float | None = None
    is_local: bool = False
    over_all: bool = False
    is_linear = False
    has_public_denominator = True
    needs_public_denominator = True

    def aggregate(self, setup: Setup, state: State, updates: Iterable[Update]) -> Aggregate:
        """Sums the changes as they come, and adds noise to every cell that a client may hold."""
        population = self.holdings(setup, state)
        rings = find_public_rings(setup, population)
        clip = read_clip(state)
        sums = self.sum_changes(rings, state, updates, clip)
        return self._release(setup, state, rings, sums)

    def aggregate_sums(self, setup: Setup, state: State, sums: RingSums) -> Aggregate:
        """Makes the mean of sums that were opened; clients have clipped their changes.

        Cells of rings that were not opened keep their values, without noise: nothing is released.
        """
        rings = find_public_rings(
            setup, self.holdings(setup, state)
        )  # finer than those of a cohort
        names = {*sums.rings.names} & {*rings.names}
        zeros = {n: torch.zeros(setup.structure.shapes[n.partition("@")[0]]) for n in rings.names}
        zeros = {n: zero.double() for n, zero in zeros.items()}
        changes = rings.gather_global(sums.rings.scatter_global(sums.changes, zeros))
        opened = {n: sums.rings.label_cells(n).double() for n in names}
        labels = rings.gather_global({**{n: zero - 1 for n, zero in zeros.items()}, **opened})
        kept = {
            ring: change
            for ring, change in changes.items()
            if int(labels[ring][0]) in sums.changes and rings[ring].holders
        }
        return self._release(setup, state, rings, kept)

    def _release(
        self, setup: Setup, state: State, rings: Rings, sums: dict[int, Tensor]
    ) -> Aggregate:
        """Adds noise to the sums, and divides them by the expected numbers of clients."""
        population, clip = self.holdings(setup, state), read_clip(state)
        expected = [self.rate * count for count in rings.count_holders(population)]
        everyone = self.rate * sum(population.values())
        divisors = [everyone] * len(expected) if self.over_all else expected
        noise_multiplier = self._find_noise_multiplier(state)
        if noise_multiplier:
            std = noise_multiplier * clip
            for ring, noise in draw_ring_noise(self.secret, state.round, sums, std).items():
                sums[ring] += noise
        old = rings.gather_global(state.params)
        new = {
            ring: torch.where(
                old[ring].isfinite(), old[ring].double() + total / divisors[ring], old[ring]
            )
            for ring, total in sums.items()
        }
        params = rings.scatter_global(new, state.params)
        for name in params.keys() & {n for n in rings.names if n.endswith("running_var")}:
            params[name] = params[name].clamp(min=0.0)  # noise may be larger than a variance
        held = [float(ring in sums and count > 0) for ring, count in enumerate(expected)]

        def trained(name: str) -> Tensor:
            if name in rings.names:
                return rings.spread(held, name) > 0
            return torch.zeros(setup.structure.shapes[name.partition("@")[0]], dtype=torch.bool)

        return Aggregate(params, trained)

    def sum_changes(
        self, rings: Rings, state: State, updates: Iterable[Update], clip: float
    ) -> dict[int, Tensor]:
        """Σ_k of the clipped changes, by ring, of every ring that a registered client holds."""
        old = {n: _to_finite(v) for n, v in rings.gather_global(state.params).items()}
        sums = {n: torch.zeros_like(old[n]) for n, ring in enumerate(rings) if ring.holders}
        for update in updates:
            vectors = rings.gather(update.subnets, update.params)
            changes = {n: _to_finite(v).sub_(old[n]) for n, v in vectors.items()}
            scales = self._find_scales(rings, changes, clip)
            for number, change in changes.items():
                sums[number].add_(change, alpha=scales[number])
        return sums

    def _find_noise_multiplier(self, state: State) -> float:
        """σ of the noise that is added to the sum here."""
        if self.is_local:
            return 0.0
        whole = read_noise_multiplier(state)
        return whole if self.count_noise is None else split_noise(whole, self.count_noise)

    def _find_scales(
        self, rings: Rings, changes: Mapping[int, Tensor], clip: float
    ) -> dict[int, float]:
        """What each ring of a change is multiplied by, so that its norm is bounded."""
        if self.is_local:
            return dict.fromkeys(changes, 1.0)
        norms = {number: float(torch.linalg.vector_norm(c)) for number, c in changes.items()}
        if self.per_ring:
            shares = share_clip(rings)
            return {n: compute_scale(norm, clip * shares[n]) for n, norm in norms.items()}
        return dict.fromkeys(changes, compute_scale(math.hypot(*norms.values()), clip))


def _to_finite(vector: Tensor) -> Tensor:
    """A copy in float64 in which constants such as -inf are zero, so that their change is."""
    return torch.nan_to_num(vector.to(torch.float64, copy=True), 0.0, 0.0, 0.0)


def compute_scale(norm: float, clip: float) -> float:
    """min(1, C / norm); 0 for a norm that is no number."""
    if not math.isfinite(norm):
        return 0.0
    return 1.0 if norm <= clip else clip / norm


def draw_ring_noise(
    secret: bytes, round: int, sums: Mapping[int, Tensor], std: float
) -> dict[int, Tensor]:
    """The noise of each ring, which also depends on the sums themselves."""
    digest = digest_tensors(sums.values())
    shapes = {f"{number}/{digest}": tuple(total.shape) for number, total in sums.items()}
    noise = draw_noise(secret, SERVER, round, shapes, std)
    return dict(zip(sums, noise.values(), strict=True))


def read_clip(state: State) -> float:
    """C of the next round."""
    return float(state.method_state[MEMORY]["clip"])


def read_noise_multiplier(state: State) -> float:
    """σ of the run: of all that is released in a round together."""
    return float(state.method_state[MEMORY]["noise_multiplier"])


@dataclass(frozen=True)
class AdaptClip(ServerUpdate):
    """Lets the clipping norm follow a quantile of the clients' norms.

    Andrew, Thakkar, McMahan, Ramaswamy. "Differentially Private Learning with Adaptive Clipping."
    NeurIPS 2021, Algorithm 1: C <- C exp(−η_C (b̃ − γ)), where b̃ is the noisy fraction of clients
    whose change was not clipped. A client's bit counts as ±1/2, so it moves the sum by 1/2.

    Args:
        quantile: γ.
        lr: η_C.
        expected: qN, the expected number of clients in a round.
        count_noise: σ_b, the standard deviation of the noise on the count.
        secret: What noise is computed from.
    """

    quantile: float
    lr: float
    expected: float
    count_noise: float
    secret: bytes = field(repr=False)
    moves_params = False
    needs_metrics = True

    def apply(self, setup: Setup, state: State, aggregate: Aggregate) -> State:
        """Moves the norm by a noisy count; the count is a release, and is accounted for."""
        bits = [reply.metrics[WITHIN] - 0.5 for reply in aggregate.replies]
        purpose = ("within", state.round, repr(sorted(bits)))
        noise = self.count_noise * float(draw_normal(self.secret, purpose, 1)[0])
        fraction = 0.5 + (sum(bits) + noise) / self.expected
        clip = read_clip(state) * math.exp(-self.lr * (fraction - self.quantile))
        memory = {**state.method_state[MEMORY], "clip": clip}
        return replace(state, method_state={**state.method_state, MEMORY: memory})


def split_noise(noise_multiplier: float, count_noise: float) -> float:
    """σ of the sum, such that it and the noisy count together are one release of the given σ.

    z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2) (Andrew et al., Theorem 1).

    >>> round(split_noise(1.0, count_noise=5.0), 4)
    1.005
    """
    if not noise_multiplier:
        return 0.0
    left = noise_multiplier**-2 - (2 * count_noise) ** -2
    if left <= 0:
        raise ConfigError(
            f"adaptive clipping counts clients with noise, and the cohort is too small for "
            f"σ = {noise_multiplier:.3g}; choose clipping 'flat', or a larger method.fraction"
        )
    return float(left**-0.5)
