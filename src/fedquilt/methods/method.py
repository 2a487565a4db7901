"""What a method is: choices over the same machinery, as pure functions of the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from torch import nn

from fedquilt.errors import BudgetError, ConfigError
from fedquilt.federation.average import average
from fedquilt.federation.client import Client, Task, Update, seed_of
from fedquilt.federation.mix import LEVELS
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.ranges import Fraction, check_fields
from fedquilt.structure.budget import fit
from fedquilt.structure.cost import cost
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors
from fedquilt.training.recipe import Recipe
from fedquilt.training.statistics import untracked

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


class Rounds:
    """What most methods have in common; a method's own file says where it differs.

    Rounds of training the user's model from its own tensors, nothing kept at home, and the mean of
    every cell over the clients that hold it.
    """

    fraction: Fraction | None  # of the clients, in each round; None: see ``Phase``
    home: tuple[str, ...] = ()
    starts_anew: bool = False
    size_kind: SizeKind = "width"

    def __post_init__(self) -> None:
        """Refuses settings that are not of their types, or out of range."""
        check_fields(self)

    def usual_budgets(self, model: nn.Module) -> tuple[float, ...]:
        """HeteroFL's levels: the whole, a half, and so on to a sixteenth."""
        return tuple(LEVELS.values())

    def exceeds_budgets(self, setup: Setup) -> str | None:
        """Nobody is asked for more than its budget allows."""
        return None

    def prepared(self, setup: Setup) -> Setup:
        """The user's model as it is."""
        return setup

    def phases(self, setup: Setup) -> tuple[Phase, ...]:
        """Rounds of training."""
        return (Phase("train", setup.rounds, self.fraction),)

    def start(self, setup: Setup) -> State:
        """The model's own tensors."""
        return initial(setup)

    def opened(self, setup: Setup, state: State, update: Update) -> Update:
        """The update as it is."""
        return update

    def merge(self, setup: Setup, state: State, updates: Iterable[Update]) -> State:
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


def alike(setup: Setup, state: State, cohort: Sequence[Client], recipe: Recipe) -> list[Task]:
    """The whole net and the same recipe for every client."""
    return [
        Task(c.id, (Subnet(),), state.params, recipe, seed_of(setup.seed, state.round, c.id))
        for c in cohort
    ]


def without_tracking(setup: Setup) -> Setup:
    """The setup whose net has no running statistics: every batch is normalised by itself."""
    model = untracked(setup.model)
    return replace(setup, model=model, structure=setup.structure.among(model))


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
