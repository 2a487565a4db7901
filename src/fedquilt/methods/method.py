"""What a method is: choices over the same machinery, as pure functions of the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import nn

from fedquilt.errors import BudgetError, ConfigError
from fedquilt.federation.average import average
from fedquilt.federation.client import Client, Task, Update, seed_of
from fedquilt.federation.mix import LEVELS
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.ranges import Count, Fraction, check_fields
from fedquilt.structure.budget import fit
from fedquilt.structure.cost import cost
from fedquilt.structure.groups import TRACKED
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors
from fedquilt.training.recipe import Recipe
from fedquilt.training.statistics import Statistics

QUERY = "statistics"  # the closing phase in which clients are asked for statistics
MOST_QUERIED = 100  # clients; where there are more, a sample of so many is asked

SizeKind = Literal["width", "parameters", "exits", "bases"]  # what a size is a fraction of
SIZE_NAMES = {"width": "width", "parameters": "γ", "exits": "depth", "bases": "width"}


class Method(Protocol):
    """Which part of the model a client gets, what it does with it, how parts come together."""

    @property
    def home(self) -> tuple[str, ...]:
        """Tensors that stay on the client, as patterns."""
        ...

    @property
    def starts_anew(self) -> bool:
        """Whether it draws initial values of its own, so that those of the model do not matter."""
        ...

    @property
    def size_kind(self) -> SizeKind:
        """What its sizes are fractions of: channels (``width``), parameters, exits, or bases."""
        ...

    def usual_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """Sizes that clients can afford, largest first, where nobody says what they can."""
        ...

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """A sentence, if clients of a prepared setup train more than they can afford."""
        ...

    @property
    def scales_outputs(self) -> bool:
        """Whether outputs of cut layers are divided by the share of their channels (Scaler)."""
        ...

    def has_statistics(self, setup: Setup) -> bool:
        """Whether the finished model has all running statistics that it normalises by.

        Otherwise it normalises every batch by itself, and its answer to an example depends on the
        others in the batch.
        """
        ...

    def prepared(self, setup: Setup) -> Setup:
        """The setup with the net that is really trained, which may be made from the user's.

        What cannot be done, with these clients, is refused here, before anything is written.
        """
        ...

    def phases(self, setup: Setup) -> tuple[Phase, ...]:
        """The stretches of a run."""
        ...

    def start(self, setup: Setup) -> State:
        """The state before the first round."""
        ...

    def plan(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """What the clients of a round are asked to do, in their order."""
        ...

    def opened(self, setup: Setup, state: State, update: Update) -> Update:
        """What came from a client, as tensors that can be merged.

        A method whose clients send codes opens them here, and refuses those that are none with an
        UpdateError.
        """
        ...

    def merge(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """The state after the updates of a round."""
        ...

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """Sizes that the method trains, largest first; ``size_kind`` says what they are."""
        ...

    def mix(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """The model of a width in a finished state: a subnet, or several whose logits are mixed."""
        ...


class Traits:
    """What a method is unless it says otherwise; no settings, so that a method may compute them."""

    fraction: Fraction | None  # of the clients, in each round; None: see ``Phase``
    is_personal: bool = False  # whether clients choose, or have, nets of their own

    @property
    def home(self) -> tuple[str, ...]:
        """Nothing stays on clients."""
        return ()

    @property
    def starts_anew(self) -> bool:
        """The model's own values are where training starts."""
        return False

    @property
    def size_kind(self) -> SizeKind:
        """Sizes are widths."""
        return "width"

    @property
    def scales_outputs(self) -> bool:
        """Outputs are as they are."""
        return False

    @property
    def tracks_statistics(self) -> bool:
        """Running statistics are a part of what clients train, like weights."""
        return True


@dataclass(frozen=True, kw_only=True)
class Rounds(Traits):
    """What most methods have in common; a method's own file says where it differs.

    Rounds of training the user's model from its own tensors, nothing kept at home, and the mean of
    every cell over the clients that hold it. At the end clients are asked for the statistics of
    batch normalisation, if training leaves none on the server; with ``query_statistics`` always or
    never. ``statistics_batch`` is the size of the batches that these are taken from.
    """

    query_statistics: bool | None = None
    statistics_batch: Count = 50

    def __post_init__(self) -> None:
        """Refuses settings that are not of their types, or out of range."""
        check_fields(self)

    def usual_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """HeteroFL's levels: the whole, a half, and so on to a sixteenth."""
        return tuple(LEVELS.values())

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Nobody trains more than its budget allows, but the closing query may ask for more."""
        return exceeding_query(setup, self) if self.closing(setup) else None

    def prepared(self, setup: Setup) -> Setup:
        """The user's model as it is."""
        return setup

    def phases(self, setup: Setup) -> tuple[Phase, ...]:
        """Rounds of training, and the closing query."""
        return (Phase("train", setup.rounds, self.fraction), *self.closing(setup))

    def closing(self, setup: Setup) -> tuple[Phase, ...]:
        """The query for statistics, if there is one."""
        is_wanted = self.query_statistics
        if is_wanted is None:
            is_wanted = self._lacks_statistics(setup)
        can_be_asked = setup.structure.statistics and shares_weights(setup, self)
        if not (is_wanted and can_be_asked):
            return ()
        return (query_phase(setup, everyone=self.is_personal),)

    def has_statistics(self, setup: Setup) -> bool:
        """Whether training or the closing query gives the model its statistics."""
        return not self._lacks_statistics(setup) or bool(self.closing(setup))

    def _lacks_statistics(self, setup: Setup) -> bool:
        """Whether statistics of a model that is shared are not on the server after training."""
        statistics = setup.structure.statistics
        at_home = statistics & setup.structure.matching(self.home)
        is_without = not self.tracks_statistics or bool(at_home)
        return bool(statistics) and is_without and shares_weights(setup, self)

    def start(self, setup: Setup) -> State:
        """The model's own tensors."""
        return initial(setup)

    def plan(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """The closing query, or a round of training."""
        if state.phase == QUERY:
            return plan_query(setup, state, cohort, self)
        return self.plan_training(setup, state, cohort)

    def plan_training(self, setup: Setup, state: State, cohort: Sequence[Client]) -> list[Task]:
        """What clients do in a round of training: what a method is about."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its clients train")

    def to_train(self, subnet: Subnet) -> Subnet:
        """A subnet as clients train it: without statistics that are not tracked."""
        return subnet if self.tracks_statistics else subnet.leaving(TRACKED)

    def asked_of(self, setup: Setup, client: Client, sizes: tuple[float, ...]) -> tuple[float, ...]:
        """The sizes whose statistics a client is asked for: by default all of them."""
        return sizes

    @property
    def statistics_recipe(self) -> Statistics:
        """How clients find statistics."""
        return Statistics(self.statistics_batch, scale=self.scales_outputs)

    def opened(self, setup: Setup, state: State, update: Update) -> Update:
        """The update as it is."""
        return update

    def merge(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """Statistics are averaged, each batch counting once; what was trained, as a method does."""
        if state.phase == QUERY:
            return merged(setup, state, updates)
        return self.merge_training(setup, state, updates)

    def merge_training(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
        """Each cell is averaged over the clients that hold it."""
        return merged(setup, state, updates)

    def sizes(self, setup: Setup) -> tuple[float, ...]:
        """The whole model; there is no smaller one that was trained as such."""
        return (1.0,)

    def mix(self, setup: Setup, state: State, width: float) -> tuple[Subnet, ...]:
        """The leading channels."""
        return (setup.structure.subnet(width),)


def shares_weights(setup: Setup, method: Method) -> bool:
    """Whether all weights are shared: what stays with clients is no more than statistics."""
    at_home = setup.structure.matching(method.home)
    return not any(name in at_home for name, _ in setup.model.named_parameters())


def initial(setup: Setup) -> State:
    """Round 0 with the model's own tensors."""
    params = {n: t.detach().clone() for n, t in named_tensors(setup.model).items()}
    return State(round=0, phase="", params=params)


def merged(setup: Setup, state: State, updates: Iterable[Update]) -> State:
    """The state whose tensors are the average of the updates, cell by cell."""
    return replace(state, params=average(state.params, setup.structure, updates))


def alike(
    setup: Setup, state: State, cohort: Sequence[Client], recipe: Recipe, subnet: Subnet
) -> list[Task]:
    """The same subnet and the same recipe for every client."""
    return [
        Task(c.id, (subnet,), state.params, recipe, seed_of(setup.seed, state.round, c.id))
        for c in cohort
    ]


def query_phase(setup: Setup, *, everyone: bool = False) -> Phase:
    """The closing phase in which clients are asked for statistics: a sample, if they are many."""
    count = len(setup.clients)
    share = 1.0 if everyone else min(1.0, MOST_QUERIED / max(count, 1))
    return Phase(QUERY, 1, share, is_closing=True)


def plan_query(setup: Setup, state: State, cohort: Sequence[Client], method: Rounds) -> list[Task]:
    """Asks clients for the statistics of the finished model, at every size (HeteroFL, Sec. 3.2).

    A size that no client of the cohort can afford is asked of all of them. A client that has a net
    of its own also finds the statistics of that one, which it keeps.
    """
    nets = {size: method.mix(setup, state, size) for size in method.sizes(setup)}
    queried = queried_sizes(setup, cohort, method)
    tasks = []
    for client in cohort:
        wanted = queried[client.id]
        subnets = tuple(dict.fromkeys(subnet for size in wanted for subnet in nets[size]))
        own = state.chosen.get(client.id)
        recipe = method.statistics_recipe
        if own is not None:
            subnets, recipe = (*subnets, own), replace(recipe, personal=True)
        seed = seed_of(setup.seed, state.round, client.id)
        if subnets:  # else all tensors would travel, to a client that can afford none of the sizes
            tasks.append(Task(client.id, subnets, state.params, recipe, seed))
    return tasks


def queried_sizes(
    setup: Setup, cohort: Sequence[Client], method: Rounds
) -> dict[int, tuple[float, ...]]:
    """The sizes whose statistics each client of a cohort is asked for, largest first."""
    sizes = method.sizes(setup)
    asked = {client.id: method.asked_of(setup, client, sizes) for client in cohort}
    nobodys = set(sizes).difference(*asked.values())
    return {
        client: tuple(size for size in sizes if size in own or size in nobodys)
        for client, own in asked.items()
    }


def exceeding_query(setup: Setup, method: Rounds) -> str | None:
    """What to say of a closing query that asks clients for more than they can afford."""
    queried, beyond = queried_sizes(setup, setup.clients, method), set()
    for size in method.sizes(setup):
        subnets = method.mix(setup, State(0, "", {}), size)
        poor = (c.id for subnet in subnets for c in unable(setup, size, subnet))
        beyond |= {client for client in poor if size in queried[client]}
    if not beyond:
        return None
    largest = max(size for client in beyond for size in queried[client])
    return (
        f"exceeds budgets: {len(beyond)} of {len(setup.clients)} clients are asked for statistics "
        f"of nets up to {SIZE_NAMES[method.size_kind]} {largest:g} at the end, and can afford less"
    )


def sizes_within_budget(
    setup: Setup, client: Client, sizes: tuple[float, ...]
) -> tuple[float, ...]:
    """Of several widths, those that a client can afford."""
    limit = affordable(setup, client)
    return tuple(width for width in sizes if width <= limit)


def affordable(setup: Setup, client: Client) -> float:
    """The widest fraction of the model that a client's budget allows."""
    width, _ = fit(setup.model, setup.structure, client.budget, setup.example)
    return width


def up_to_budget(setup: Setup, client: Client, sizes: tuple[float, ...]) -> list[float]:
    """The widths, largest first, that a client can afford; what it can afford if that is less."""
    limit = affordable(setup, client)
    return [width for width in sizes if width <= limit + 1e-9] or [limit]


def within(setup: Setup, client: Client, sizes: Mapping[float, Subnet]) -> list[float]:
    """Of several sizes, as fractions of the model, those that a client can afford; largest first.

    A budget's width is the largest fraction; its physical limits hold for the subnet.
    """
    found, budget = [], client.budget
    for size in sorted(sizes, reverse=True):
        if size <= budget.width + 1e-9 and (
            budget.is_width_alone
            or budget.allows(cost(setup.model, setup.structure, sizes[size], setup.example))
        ):
            found.append(size)
    if not found:
        smallest = cost(setup.model, setup.structure, sizes[min(sizes)], setup.example)
        raise BudgetError(
            f"no size meets {budget} of client {client.id}; the smallest is {min(sizes):g} of the "
            f"model and costs {smallest}; raise the budget, or let the method have smaller sizes"
        )
    return found


def unable(setup: Setup, size: float, subnet: Subnet) -> list[Client]:
    """Clients whose budget does not allow a subnet, which is that fraction of the model."""
    limited = not all(client.budget.is_width_alone for client in setup.clients)
    price = cost(setup.model, setup.structure, subnet, setup.example) if limited else None
    return [
        client
        for client in setup.clients
        if size > client.budget.width + 1e-9
        or (price is not None and not client.budget.allows(price))
    ]


def ignored_budgets(setup: Setup, size: float = 1.0, subnet: Subnet | None = None) -> str | None:
    """What to say of a method that has everybody train one net; None if all can afford it."""
    poor = unable(setup, size, subnet or Subnet())
    if not poor:
        return None
    net = "the whole net" if size == 1 else f"a net of width {size:g}"
    return (
        f"ignores budgets: {net} is trained, and {len(poor)} of {len(setup.clients)} clients can "
        "afford less"
    )


def trained_sizes(setup: Setup, widths: tuple[float, ...] | None) -> tuple[float, ...]:
    """The widths that a method names, or else those that budgets allow, largest first."""
    return budget_sizes(setup) if widths is None else tuple(sorted(widths, reverse=True))


def refuse_no_widths(widths: tuple[float, ...] | None) -> None:
    """Refuses what is no fraction of a model."""
    for width in widths or ():
        if not 0 < width <= 1:
            raise ConfigError(f"widths are fractions in (0, 1], got {width}")


def nested(setup: Setup, width: float, sizes: tuple[float, ...], own: str) -> Subnet:
    """The leading channels; what ``own`` means is that of the width, or of the next larger size."""
    subnet = setup.structure.subnet(width)
    if not setup.structure.statistics:
        return subnet
    wide_enough = [size for size in sizes if size >= width - 1e-9]
    return subnet.owning(f"{min(wide_enough) if wide_enough else max(sizes):g}", own)


def budget_sizes(setup: Setup) -> tuple[float, ...]:
    """The widths that the clients' budgets allow, largest first."""
    return tuple(sorted({affordable(setup, c) for c in setup.clients}, reverse=True))
