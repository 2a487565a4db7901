"""The rounds of a private run: who takes part, what clients send, and what it has cost so far.

What a client trains does not depend on who else is in the cohort, and the expected number of
holders of every cell is public. A method whose clients of one budget all train the same is planned
once for each budget; another for all registered clients, whoever takes part. Cohorts are drawn from
the run's secret: who took part is not to be known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedquilt.errors import CheckpointError, ConfigError
from fedquilt.federation.aggregation import AggregationPipeline, FullMean, LabelAwareMean, Mean
from fedquilt.federation.client import Task
from fedquilt.federation.columns import ComputedColumn, Integers
from fedquilt.federation.privacy.accountant import Accountant, PrivacySpent
from fedquilt.federation.privacy.mechanism import (
    MEMORY,
    AdaptClip,
    PrivateMean,
    RequireWholeReply,
    find_public_rings,
    read_clip,
    read_noise_multiplier,
    share_clip,
    split_noise,
)
from fedquilt.federation.privacy.noise import derive_secret, draw_poisson, draw_rows
from fedquilt.federation.privacy.settings import Privacy
from fedquilt.federation.registry import ClientRegistry
from fedquilt.federation.rings import Holding
from fedquilt.federation.secure import SecureAggregation
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.federation.tasks import LazyTasks, map_tasks
from fedquilt.methods.method import Method
from fedquilt.runs.accounting import count_subnet_bytes
from fedquilt.runs.events import RoundDone
from fedquilt.runs.phases import count_rounds, find_phase
from fedquilt.training.dpsgd import DPSGD, count_steps, refuse_unsupported
from fedquilt.training.local_sgd import LocalSGD
from fedquilt.training.private import PrivateReply
from fedquilt.training.settings import LoopSettings

COUNT_NOISE = 1 / 20  # of the expected cohort: σ_b of adaptive clipping (Andrew et al., Sec. 3.1)
LOCAL_SENSITIVITY = 2.0  # clipping norms between two changes that one client may send


@dataclass(eq=False)
class PrivateRounds:
    """Plans, accounts for and composes the rounds of a private run.

    Args:
        privacy: What the user asks for.
        setup: What stays the same during the run; its clients are without data.
        method: The method, with nothing on that tells of clients' data.
        secret: What cohorts and noise are drawn from.
        secure: How updates are summed, if the server sees sums only. Then clients share the noise
            of the local mechanism: every sum has as many parts as the threshold, or more.
    """

    privacy: Privacy
    setup: Setup
    method: Method
    secret: bytes = field(repr=False)
    secure: SecureAggregation | None = None
    _held: tuple[int, Counter[Holding]] | None = field(default=None, init=False)  # in a round

    @cached_property
    def phase(self) -> Phase:
        """The phase of training; a private run has no other."""
        phases = self.method.phases(self.setup)
        if len(phases) != 1 or phases[0].is_closing:
            names = ", ".join(phase.name for phase in phases)
            raise ConfigError(
                f"a private run accounts for rounds of training only, and "
                f"{type(self.method).__name__} has the phases {names}; choose another method"
            )
        return phases[0]

    @property
    def rate(self) -> float:
        """The probability that a client takes part in a round."""
        return self.phase.sampling_rate(self.setup.registry)

    @cached_property
    def accountant(self) -> Accountant:
        """What finds ε of a number of releases."""
        privacy, sampling = self.privacy, self.setup.sampling
        delta = privacy.choose_delta(len(self.setup.clients))
        if privacy.is_central:
            return Accountant(delta, self.rate, sampling, privacy.accountant)
        rate = 1.0  # the server sees who answers, so drawing clients hides nothing
        if privacy.min_examples is not None:
            # of all larger clients, none has a larger ε than one with whole batches only
            rate = 1 / max(1, privacy.min_examples // self._loop.batch_size)
        return Accountant(delta, rate, "poisson", privacy.accountant)

    @property
    def _loop(self) -> LoopSettings:
        """Epochs and batches of clients."""
        settings: LoopSettings = self.method.local_training.loop  # type: ignore[attr-defined]
        return settings

    @cached_property
    def count_noise(self) -> float | None:
        """σ_b of adaptive clipping; None: the norm stays."""
        if self.privacy.clipping != "adaptive":
            return None
        return COUNT_NOISE * self.rate * len(self.setup.clients)

    def start(self, state: State) -> State:
        """The first state, with the clipping norm and the noise; refuses what cannot be private."""
        nets = self._count_nets(state)
        memory = {
            "clip": self.privacy.clip,
            "noise_multiplier": self._find_noise_multiplier(nets),
            "nets": nets,
        }
        state = replace(state, method_state={**state.method_state, MEMORY: memory})
        rings = find_public_rings(self.setup, self.count_holdings(self.setup, state))
        self._refuse_local_tensors()
        if self.privacy.is_by_example:
            refuse_unsupported(self.setup.model)
            for task in self._plan(state, np.arange(1)):
                self._make_steps_private(task, state)
        if not any(ring.holders for ring in rings):
            raise ConfigError("no tensor leaves the clients, so there is nothing to make private")
        if self.count_noise is not None:
            split_noise(memory["noise_multiplier"], self.count_noise)
        return state

    def _refuse_local_tensors(self) -> None:
        """Only clients could tell how well a model with tensors of their own does."""
        local = sorted(self.setup.structure.match_names(self.method.local_params))
        if local:
            raise ConfigError(
                f"{type(self.method).__name__} keeps '{local[0]}' on its clients, and to evaluate "
                "that would tell of their data; share all tensors, or choose another method"
            )

    def _count_nets(self, state: State) -> int:
        """How many nets a client trains at most, each with noise in its own steps."""
        return max(map(len, self.count_holdings(self.setup, state)))

    def _find_noise_multiplier(self, nets: int) -> float:
        privacy = self.privacy
        if privacy.noise_multiplier is not None:
            return privacy.noise_multiplier
        assert privacy.epsilon is not None
        rounds = count_rounds(self.method, self.setup)
        releases = max(self.count_releases(rounds, nets), 1)
        return self.sensitivity * self.accountant.find_noise_multiplier(privacy.epsilon, releases)

    @property
    def sensitivity(self) -> float:
        """How far two neighbors are apart at most, in clipping norms."""
        return LOCAL_SENSITIVITY if self.privacy.mechanism == "local" else 1.0

    def count_releases(self, rounds: int, nets: int = 1) -> int:
        """How often noise is drawn about one client, or one example, in the first rounds.

        Args:
            rounds: The number of rounds.
            nets: With dp-sgd, how many nets a client trains in a round.
        """
        privacy = self.privacy
        if privacy.is_central:
            return rounds
        steps = 1
        if privacy.min_examples is not None:
            loop = self._loop
            steps = nets * count_steps(privacy.min_examples, loop.batch_size, loop.epochs)
        return steps * self.count_participations(rounds)

    def count_participations(self, rounds: int) -> int:
        """In how many of the first rounds the client that is drawn most often takes part."""
        counts = Counter(c for n in range(rounds) for c in self.sample_cohort(n).tolist())
        return max(counts.values(), default=0)

    def count_affordable_rounds(self, state: State) -> int:
        """The rounds after which the run stops: all of them, or as many as the budget allows."""
        total, epsilon = count_rounds(self.method, self.setup), self.privacy.epsilon
        if epsilon is None:
            return total
        low, high = 0, total  # the last round that is within the budget
        while low < high:
            middle = (low + high + 1) // 2
            if self.compute_epsilon(state, middle) <= epsilon:
                low = middle
            else:
                high = middle - 1
        return low

    def compute_epsilon(self, state: State, rounds: int) -> float:
        """ε of the first rounds of the run."""
        noise_multiplier = read_noise_multiplier(state) / self.sensitivity
        releases = self.count_releases(rounds, int(state.method_state[MEMORY]["nets"]))
        return self.accountant.compute_epsilon(noise_multiplier, releases)

    @property
    def _clients(self) -> ClientRegistry:
        return self.phase.eligible(self.setup.registry)

    def sample_cohort(self, round: int) -> Integers:
        """The rows of the clients of a round, in order; only the secret tells them."""
        count, purpose = len(self._clients), ("cohort", round)
        if self.setup.sampling == "poisson":
            return draw_poisson(self.secret, purpose, count, self.rate)
        return draw_rows(self.secret, purpose, count, self.phase.cohort_size(count))

    def plan(self, state: State, available: Collection[int] | None) -> Sequence[Task]:
        """The tasks of the clients that are drawn and available; None: all are."""
        rows, numbers = self.sample_cohort(state.round), self._clients.ids
        if available is not None:
            known = set(available)
            rows = np.array([row for row in rows.tolist() if numbers[row] in known], np.int64)
        settings = self._bound(state)
        std = read_noise_multiplier(state) * read_clip(state) / math.sqrt(self._num_sharing)

        def make_private(task: Task) -> Task:
            if self.privacy.is_by_example:
                task = self._make_steps_private(task, state)
            recipe = PrivateReply(task.recipe, **settings)
            if self.privacy.mechanism == "local":
                secret = derive_secret(self.secret, "client", task.client).hex()
                recipe = replace(recipe, noise=std, secret=secret, round=state.round)
            return replace(task, recipe=recipe)

        return map_tasks(make_private, self._plan(state, rows))

    @property
    def _num_sharing(self) -> int:
        """How many clients at least share the noise of a sum that the server sees."""
        return 1 if self.secure is None else self.secure.threshold

    def _bound(self, state: State) -> dict[str, Any]:
        privacy = self.privacy
        bounds_whole = privacy.clipping != "rings" and not privacy.is_by_example
        return {
            "clip": read_clip(state) if bounds_whole else None,
            "max_examples": privacy.max_examples,
            "counts_clipping": privacy.clipping == "adaptive",
        }

    def _make_steps_private(self, task: Task, state: State) -> Task:
        """The task with noise in every step of its training."""
        sgd, privacy = task.recipe, self.privacy
        if not isinstance(sgd, LocalSGD):
            raise ConfigError(
                f"dp-sgd takes the place of plain local training, and clients of "
                f"{type(self.method).__name__} do {type(sgd).__name__}; choose another method, or "
                "the central mechanism"
            )
        assert privacy.min_examples is not None
        recipe = DPSGD(
            replace(sgd, labels=(), masked=False),
            read_noise_multiplier(state),
            read_clip(state),
            privacy.min_examples,
            derive_secret(self.secret, "client", task.client).hex(),
            state.round,
        )
        return replace(task, recipe=recipe)

    def _plan(self, state: State, rows: Integers) -> Sequence[Task]:
        """The method's tasks of the clients in some rows, as if all registered clients had one."""
        state = replace(state, phase=find_phase(state.round, self.method, self.setup).name)
        clients = self._clients
        if self.method.plans_by_budget:
            some = ComputedColumn(lambda row: clients[int(rows[row])], len(rows))
            return self.method.plan(self.setup, state, some)
        everyone = self.method.plan(self.setup, state, clients)
        return LazyTasks(len(rows), lambda row: everyone[int(rows[row])])

    def count_holdings(self, setup: Setup, state: State) -> Mapping[Holding, int]:
        """What registered clients hold in a round; public."""
        if self._held is None or self._held[0] != state.round:
            clients, held = self._clients, Counter[Holding]()
            if self.method.plans_by_budget:
                rows = np.array(clients.budgets.first_rows, np.int64)
                for client, task in zip(
                    clients.one_per_budget, self._plan(state, rows), strict=True
                ):
                    held[tuple(task.subnets)] += clients.budget_counts[client.budget]
            else:
                held.update(tuple(t.subnets) for t in self._plan(state, np.arange(len(clients))))
            self._held = state.round, held
        return self._held[1]

    def make_pipeline(self, pipeline: AggregationPipeline) -> AggregationPipeline:
        """The method's pipeline with a private mean."""
        if type(pipeline.aggregator) not in (Mean, LabelAwareMean, FullMean):
            raise ConfigError(
                f"privacy is a mean with noise, and {type(self.method).__name__} merges by "
                f"{pipeline.aggregator}; choose a method or rule that takes the mean"
            )
        mean = PrivateMean(
            self.count_holdings,
            self.rate,
            self.secret,
            per_ring=self.privacy.clipping == "rings",
            count_noise=self.count_noise,
            is_local=not self.privacy.is_central,
            over_all=isinstance(pipeline.aggregator, FullMean),
        )
        adapt = self._make_adaptation()
        validators = (*pipeline.validators, RequireWholeReply(self.count_holdings))
        return replace(
            pipeline,
            validators=pipeline.validators if self.secure is not None else validators,
            aggregator=mean,
            server_updates=(*pipeline.server_updates, *adapt),
        )

    def _make_adaptation(self) -> tuple[AdaptClip, ...]:
        if self.count_noise is None:
            return ()
        expected = self.rate * len(self.setup.clients)
        privacy = self.privacy
        return (
            AdaptClip(privacy.quantile, privacy.clip_lr, expected, self.count_noise, self.secret),
        )

    def conceal(self, done: RoundDone, state: State) -> RoundDone:
        """A round as it may be told: expected numbers instead of who took part, and what it cost.

        Args:
            done: The round as it was.
            state: The state that the round started from.
        """
        sizes = (
            count_subnet_bytes(self.setup, subnet) * count
            for holding, count in self.count_holdings(self.setup, state).items()
            for subnet in holding
        )
        expected = round(self.rate * sum(sizes))
        return RoundDone(
            done.round,
            done.phase,
            None,
            round(self.rate * len(self.setup.clients)),
            (),
            expected,
            expected,
            done.seconds,
            privacy=self.describe(state, done.round),
            secure=None if self.privacy.is_central else done.secure,
        )

    def describe(self, state: State, rounds: int) -> PrivacySpent:
        """What the rounds so far have cost; ``state`` is the one that the last round started from.

        Args:
            state: Has the clipping norm and the noise of the round.
            rounds: The number of rounds that are done.
        """
        noise_multiplier, clip = read_noise_multiplier(state), read_clip(state)
        on_sum = noise_multiplier
        if self.count_noise is not None:
            on_sum = split_noise(noise_multiplier, self.count_noise)
        population = self.count_holdings(self.setup, state)
        rings = find_public_rings(self.setup, population)
        holders = rings.count_holders(population)
        spread = on_sum * clip / self.rate
        noise = {f"{count:g}": _shorten(spread / count) for count in holders if count}
        if self.privacy.is_by_example:  # it is in the steps of clients
            noise = {}
        elif not self.privacy.is_central:  # every holder adds its own noise
            noise = {
                f"{count:g}": _shorten(spread * math.sqrt(self.rate / count / self._num_sharing))
                for count in holders
                if count
            }
        return PrivacySpent(
            _shorten_epsilon(self.compute_epsilon(state, rounds)),
            self.accountant.delta,
            noise_multiplier,
            clip,
            noise,
            self._compute_tier_epsilon(state, rounds),
            self.privacy.mechanism,
        )

    def _compute_tier_epsilon(self, state: State, rounds: int) -> dict[str, float | None]:
        """ε by the number of parameters that a client holds: 1/σ_t² = Σ_{g held} 1/σ_g².

        σ_g = σ C / C_g is the noise of ring g, relative to its own clipping norm.
        """
        if self.privacy.clipping != "rings":
            return {}
        population = self.count_holdings(self.setup, state)
        rings = find_public_rings(self.setup, population)
        shares = share_clip(rings)
        tiers: dict[str, float | None] = {}
        for number in range(len(rings.holdings)):
            held = [n for n, ring in enumerate(rings) if number in ring.holders]
            share = math.hypot(*(shares[n] for n in held))  # C_t / C = σ / σ_t
            noise_multiplier = read_noise_multiplier(state) / share if share else math.inf
            cells = sum(rings[n].num_cells for n in held)
            epsilon = self.accountant.compute_epsilon(noise_multiplier, rounds)
            tiers[f"{cells}"] = _shorten_epsilon(epsilon)
        return dict(sorted(tiers.items(), key=lambda pair: -int(pair[0])))


def require_same_privacy(state: State, *, is_private: bool) -> None:
    """Refuses to go on with a private run as another kind of run, or the other way round."""
    if (MEMORY in state.method_state) != is_private:
        raise CheckpointError(
            "a private run is resumed with its privacy settings, and another without; give the "
            "settings that it was started with"
        )


def _shorten_epsilon(epsilon: float) -> float | None:
    """ε as records have it: None if there is no bound."""
    return _shorten(epsilon) if math.isfinite(epsilon) else None


def _shorten(value: float) -> float:
    """A number with the digits that records need."""
    return float(f"{value:.6g}")
