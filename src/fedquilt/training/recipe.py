"""A recipe names what a client does; the workbench is what it does it with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from fedquilt.data import ClientData
from fedquilt.data.examples import Joined
from fedquilt.federation.client import EVERYONE, PERSONAL, SERVER, Task, Update
from fedquilt.structure.cut import (
    Params,
    build,
    cells,
    cells_within,
    load,
    look,
    source_name,
    view,
)
from fedquilt.structure.groups import TRACKED, Structure
from fedquilt.structure.layout import lay_out
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.trace import named_tensors
from fedquilt.training.tracking import untracked

MOST_MODELS = 16  # built modules that a workbench keeps


class Recipe(Protocol):
    """A frozen dataclass of plain settings that knows how to do one kind of client work.

    It may also have ``terms(task, client)``, which says what the answer may be; whatever is not
    within them is refused (``fedquilt.federation.boundary``). The client is as it has registered.
    """

    def run(self, task: Task, bench: Workbench) -> Update:
        """Does the work for one client."""
        ...


class Workbench:
    """What clients have at hand on one worker: their data, their own state, modules built once."""

    def __init__(
        self, model: nn.Module, structure: Structure, data: Mapping[str, Mapping[int, ClientData]]
    ):
        self.model, self.structure = model, structure
        self._data = data
        self._joined: dict[str, ClientData] = {}  # everyone's, by split
        self._built: OrderedDict[tuple[Subnet, int, bool], nn.Module] = OrderedDict()
        self.kept: Mapping[str, Tensor] | None = None  # the state of the client at work
        self.to_keep: Mapping[str, Tensor] | None = None  # its new state, if it changed
        self.listener: Callable[[float], None] | None = None  # hears what the client tells
        # the model that the client would itself use after its work, if not what it sends
        self.own: tuple[Sequence[Subnet], Sequence[Params]] | None = None

    def examples(self, split: str, client: int) -> ClientData:
        """The client's data: ``train``, ``test`` or ``validation``.

        A client that held nothing back for validation chooses by what it trains on. ``EVERYONE``
        has the data of all clients, in the order of their numbers.
        """
        if client == EVERYONE:
            if split not in self._joined:
                clients = sorted(self._data[split].keys() - {SERVER})
                self._joined[split] = Joined(tuple(self._data[split][c] for c in clients))
            return self._joined[split]
        if split == "validation" and client not in self._data.get(split, {}):
            split = "train"
        return self._data[split][client]

    def tell(self, done: float) -> None:
        """Says which share of the client's work is done, from 0 to 1.

        Work that takes long should, so that others can see it go on; as often as is convenient,
        because whoever listens hears only a few times a second.
        """
        if self.listener is not None:
            self.listener(done)

    def modules(
        self, subnets: Sequence[Subnet], params: Params, home: tuple[str, ...] = ()
    ) -> list[nn.Module]:
        """A module for each of several subnets, side by side."""
        found: list[nn.Module] = []
        for number, subnet in enumerate(subnets):
            copy = sum(other.shape == subnet.shape for other in subnets[:number])
            found.append(self.module(subnet, params, home, copy=copy))
        return found

    def module(
        self, subnet: Subnet, params: Params, home: tuple[str, ...] = (), *, copy: int = 0
    ) -> nn.Module:
        """The subnet's module holding the subnet's cells of the global tensors.

        Tensors that match ``home`` stay on the client: they come from its state, or at first from
        the model's own initial values. What is the subnet's own comes from the client's state too,
        if that has it. Subnets of one shape take turns in one module, unless they ask for another
        ``copy`` of it. A subnet that leaves out statistics has none: it normalises each batch by
        itself.
        """
        shape = subnet.shape
        module = self._module(shape, copy, tracks=self._tracks(subnet, home))
        load(module, look(params, self.structure, subnet.leaving(*home)))
        left_out = self.structure.matching(subnet.without) | self.structure.matching(home)
        left_out -= self.structure.gone(subnet)
        if left_out:
            initial, where = named_tensors(self.model), cells(self.structure, shape)
            left_out &= named_tensors(module).keys()
            load(module, {n: view(initial[n].detach(), where[n]) for n in left_out})
        if self.kept is not None and (home or subnet.own):
            names = {source_name(n, self.structure, subnet): n for n in named_tensors(module)}
            mine = (n for n in self.kept if n in names and (home or n != names[n]))
            load(module, {names[n]: self.kept[n] for n in mine})
        return module

    def _tracks(self, subnet: Subnet, home: tuple[str, ...]) -> bool:
        """Whether a subnet has statistics: shared ones, or those that stay on the client."""
        there = home if subnet.owner != PERSONAL else (*home, *subnet.own)
        left_out = self.structure.matching(subnet.without) - self.structure.matching(there)
        tracked = self.structure.matching((TRACKED,))
        return not tracked or not tracked <= left_out

    def _module(self, shape: Subnet, copy: int, *, tracks: bool) -> nn.Module:
        key = (shape, copy, tracks)
        if key not in self._built:
            built = build(self.model, self.structure, shape)
            self._built[key] = built if tracks else untracked(built)
            if self.structure.channels_last:
                lay_out(self._built[key])
            if len(self._built) > MOST_MODELS:
                self._built.popitem(last=False)
        self._built.move_to_end(key)
        return self._built[key]

    def keep(self, module: nn.Module, subnet: Subnet, home: tuple[str, ...]) -> None:
        """Remembers the tensors that stay on the client, beside those that it keeps already."""
        if home:
            names = self.structure.matching(home)
            before = self.kept if self.to_keep is None else self.to_keep
            self.to_keep = dict(before or {}) | {
                source_name(n, self.structure, subnet): t.detach().clone()
                for n, t in named_tensors(module).items()
                if n in names
            }

    def lacks_statistics(self, subnet: Subnet, home: tuple[str, ...]) -> bool:
        """Whether statistics of a subnet stay on the client, and it has none.

        They do if the net is the client's own, or if ``home`` names them and no weights.
        """
        at_home = self.structure.matching(home)
        if any(name in at_home for name, _ in self.model.named_parameters()):
            return False
        if subnet.owner == PERSONAL:
            at_home |= self.structure.matching(subnet.own)
        there = (self.kept or {}).keys()
        own = (self.structure.statistics & at_home) - self.structure.gone(subnet)
        return any(source_name(name, self.structure, subnet) not in there for name in own)

    def tensors(self, module: nn.Module, subnet: Subnet, built_for: Subnet) -> dict[str, Tensor]:
        """A copy of a module's tensors that are part of a subnet of what it was built for."""
        own = {n: t.detach() for n, t in named_tensors(module).items()}
        names = self.structure.names(subnet)
        if subnet.shape == built_for.shape:
            return {n: own[n].clone() for n in names}
        where = cells_within(self.structure, built_for, subnet)
        return {n: view(own[n], where[n]).clone() for n in names}
