"""The context of a client's work: what a recipe has at hand on one worker."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData, ConcatExamples
from fedquilt.data.bound import bind_examples_to
from fedquilt.devices import CPU, is_accelerator, release_cached_memory
from fedquilt.errors import ConfigError
from fedquilt.federation.client import EVERYONE, PERSONAL, SERVER
from fedquilt.learning.task import CLASSIFICATION, LearningTask
from fedquilt.structure.cut import (
    Params,
    SubnetTensors,
    build_module,
    global_name,
    index_cells,
    index_cells_within,
    load_tensors,
    view_cells,
    view_subnet_tensors,
)
from fedquilt.structure.layout import use_channels_last
from fedquilt.structure.structure import TRACKED, Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import copy_to_device, named_tensors
from fedquilt.training.client_loss import ClientLoss, Masked
from fedquilt.training.device_data import ResidentData
from fedquilt.training.tracking import without_running_stats

if TYPE_CHECKING:
    from fedquilt.federation.secure.store import SecretStore

MAX_MODULES = 16  # built modules that a worker keeps


class ClientContext:
    """What a client has at hand on one worker: its data, its state, and modules of subnets.

    Args:
        model: The whole model, with its initial values.
        structure: What can be cut in the model.
        data: Examples of each client of this worker, by split.
        device: Where modules and batches are. Data and model are given on the host; the copies on
            the device are made when they are first used.
        task: What is learned: the loss and the metrics.
        secrets: A folder for secrets of a round, which only this worker's clients can read.

    >>> import torch, fedquilt as fq
    >>> inputs, labels = torch.rand(12, 4), torch.arange(12) % 3
    >>> clients = fq.make_clients((inputs, labels), count=2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> structure = fq.trace_structure(model, inputs[:1])
    >>> context = fq.ClientContext(model, structure, {"train": clients.train})
    >>> context.module(structure.subnet(0.5), model.state_dict())[0]
    Linear(in_features=4, out_features=4, bias=True)
    >>> len(context.examples("train", client=0))
    6
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        data: Mapping[str, Mapping[int, ClientData]],
        device: torch.device = CPU,
        task: LearningTask = CLASSIFICATION,
        *,
        secrets: Path | None = None,
    ):
        self._host_model, self.structure, self.device = model, structure, device
        self.task = task
        self._data = data
        self._change_data: Callable[[ClientData, str], ClientData] = _keep_data
        self._shared = _Shared()
        self._joined: dict[str, ClientData] = {}  # everyone's, by split
        self._built: OrderedDict[tuple[Subnet, int, bool], nn.Module] = OrderedDict()
        self._secrets = secrets
        self._client_state: Mapping[str, Tensor] = {}
        self._on_progress: Callable[[float], None] | None = None
        self.noise_secret = b""  # of a machine of its own; the server does not know it
        self.min_threshold: int | None = None  # of secure sums; None: it also sends plain updates

    def for_client(
        self,
        client_state: Mapping[str, Tensor] | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> ClientContext:
        """The context of one client's work; built modules are shared with this one.

        Args:
            client_state: What the client has kept from earlier rounds.
            on_progress: Is called with the part of the work that is done, from 0 to 1.
        """
        context = copy.copy(self)
        context._client_state = {} if client_state is None else client_state
        context._on_progress = on_progress
        return context

    def client_loss(
        self, labels: tuple[int, ...] | None = None, masked: Masked = True
    ) -> ClientLoss:
        """The loss of the task.

        Args:
            labels: The classes that it is over, if the task has classes; None: all.
            masked: With ``batch`` it is over the classes of each batch instead; False: over all.
        """
        if not (masked and self.task.has_classes):
            return ClientLoss(self.task.loss)
        is_by_batch = masked == "batch"
        return ClientLoss(self.task.loss, None if is_by_batch else labels or None, is_by_batch)

    @property
    def model(self) -> nn.Module:
        """The whole model on the context's device, with its initial values."""
        if not is_accelerator(self.device):
            return self._host_model
        if self._shared.model is None:
            self._shared.model = copy_to_device(self._host_model, self.device)
        return self._shared.model

    def to_device(self, params: Params) -> Params:
        """The tensors on the context's device.

        Those of the last call are kept: most clients of a round start from the same.

        Args:
            params: Global tensors, on the host.
        """
        if not is_accelerator(self.device):
            return params
        if self._shared.given is not params:
            self._shared.given, self._shared.moved = params, {}  # the old ones need memory
            self._shared.moved = _move_params(params, self.device)
        return self._shared.moved

    def release_memory(self) -> None:
        """Frees what was kept on the device to save time: modules, data and global tensors."""
        self._built.clear()
        self._joined.clear()
        model, self._shared.model = self._shared.model, None
        del model
        self._shared.given, self._shared.moved = None, {}
        if self._shared.resident is not None:
            self._shared.resident.release()
        gc.collect()  # cycles hold tensors, too; those of an exception and its frames, say
        if is_accelerator(self.device):
            release_cached_memory(self.device)

    @property
    def client_state(self) -> Mapping[str, Tensor]:
        """What the client has kept from earlier rounds; empty if it has kept nothing."""
        return MappingProxyType(self._client_state)

    @property
    def secrets(self) -> SecretStore:
        """Where clients keep secrets between the steps of a secure sum."""
        from fedquilt.federation.secure.store import SecretStore  # which needs an extra

        if self._secrets is None:
            raise ConfigError("a secure sum needs an engine with a folder for clients' secrets")
        return SecretStore(self._secrets)

    def examples(self, split: str, client: int) -> ClientData:
        """The data of a client.

        A client that held nothing back for validation chooses by what it trains on.

        Args:
            split: ``train``, ``test`` or ``validation``.
            client: The client's number. ``EVERYONE`` has the data of all clients, in the order of
                their numbers.
        """
        if client == EVERYONE:
            if split not in self._joined:
                clients = sorted(self._data[split].keys() - {SERVER})
                self._joined[split] = ConcatExamples(tuple(self._data[split][c] for c in clients))
            return self._change_data(self._place(self._joined[split], (split, client)), split)
        if split == "validation" and client not in self._data.get(split, {}):
            split = "train"
        return self._change_data(self._place(self._data[split][client], (split, client)), split)

    def with_data(self, change: Callable[[ClientData, str], ClientData]) -> ClientContext:
        """The same context with other data.

        Args:
            change: Makes them of the data and the name of their split.
        """
        context = copy.copy(self)
        context._change_data = change
        return context

    def _place(self, data: ClientData, key: Hashable) -> ClientData:
        """The data with inputs in the order of the model's arguments, and batches on the device."""
        data = bind_examples_to(self._host_model, data)
        if not is_accelerator(self.device):
            return data
        if self._shared.resident is None:
            self._shared.resident = ResidentData(self.device)
        return self._shared.resident.wrap(data, key)

    def report_progress(self, done: float) -> None:
        """Reports how much of the client's work is done.

        Work that takes long should call it, as often as is convenient: the engine passes on only a
        few reports a second.

        Args:
            done: The part of the work that is done, from 0 to 1.
        """
        if self._on_progress is not None:
            self._on_progress(done)

    def modules(
        self, subnets: Sequence[Subnet], params: Params, local_params: tuple[str, ...] = ()
    ) -> list[nn.Module]:
        """A module for each of several subnets, side by side; see ``module``.

        Args:
            subnets: What of the model to build.
            params: The global tensors.
            local_params: Patterns of tensors that stay on the client.
        """
        modules: list[nn.Module] = []
        for number, subnet in enumerate(subnets):
            copy_number = sum(other.shape == subnet.shape for other in subnets[:number])
            modules.append(self.module(subnet, params, local_params, copy_number=copy_number))
        return modules

    def module(
        self,
        subnet: Subnet,
        params: Params,
        local_params: tuple[str, ...] = (),
        *,
        copy_number: int = 0,
    ) -> nn.Module:
        """The subnet's module, with the subnet's cells of the global tensors.

        Modules are built once and used again: a module is valid until the next call for a subnet
        of the same shape and ``copy_number``. A subnet that excludes running statistics has none:
        it normalizes each batch by itself.

        Args:
            subnet: What of the model to build.
            params: The global tensors.
            local_params: Patterns of tensors that stay on the client. They come from the client's
                state, or at first from the model's initial values. The subnet's private tensors
                come from the client's state too, if that has them.
            copy_number: Which of several modules of this shape.
        """
        shape = subnet.shape
        module = self._module(shape, copy_number, tracks=self._has_statistics(subnet, local_params))
        sent = subnet.excluding(*local_params)
        load_tensors(module, view_subnet_tensors(params, self.structure, sent))
        not_sent = self.structure.match_names(subnet.excluded)
        not_sent |= self.structure.match_names(local_params)
        not_sent -= self.structure.dropped_tensors(subnet)
        if not_sent:
            initial, where = named_tensors(self.model), index_cells(self.structure, shape)
            not_sent &= named_tensors(module).keys()
            load_tensors(module, {n: view_cells(initial[n].detach(), where[n]) for n in not_sent})
        state = self._client_state
        if state and (local_params or subnet.private):
            names = {global_name(n, self.structure, subnet): n for n in named_tensors(module)}
            own = (n for n in state if n in names and (local_params or n != names[n]))
            load_tensors(module, {names[n]: state[n] for n in own})
        return module

    def _has_statistics(self, subnet: Subnet, local_params: tuple[str, ...]) -> bool:
        """Whether a subnet has statistics: shared ones, or those that stay on the client."""
        local = local_params if subnet.owner != PERSONAL else (*local_params, *subnet.private)
        missing = self.structure.match_names(subnet.excluded) - self.structure.match_names(local)
        tracked = self.structure.match_names((TRACKED,))
        return not tracked or not tracked <= missing

    def _module(self, shape: Subnet, copy_number: int, *, tracks: bool) -> nn.Module:
        key = (shape, copy_number, tracks)
        if key not in self._built:
            # values come later, from the tensors that are sent; the model's need not be read
            blank = {
                name: tensor.detach().new_zeros(()).expand(tensor.shape)
                for name, tensor in named_tensors(self.model).items()
                if name in self.structure.shapes
            }
            built = build_module(self.model, self.structure, shape, blank)
            self._built[key] = built if tracks else without_running_stats(built)
            if self.structure.channels_last:
                use_channels_last(self._built[key])
            if len(self._built) > MAX_MODULES:
                self._built.popitem(last=False)
        self._built.move_to_end(key)
        return self._built[key]

    def next_client_state(
        self, modules: Sequence[nn.Module], subnets: Sequence[Subnet], local_params: tuple[str, ...]
    ) -> dict[str, Tensor] | None:
        """The client's state with a copy of the modules' tensors that stay on the client.

        What the state has besides them stays in it. None if no tensor stays on the client.

        Args:
            modules: The modules after the work.
            subnets: What each of them was built for.
            local_params: Patterns of tensors that stay on the client.
        """
        if not (modules and local_params):
            return None
        names, state = self.structure.match_names(local_params), dict(self._client_state)
        for module, subnet in zip(modules, subnets, strict=True):
            for name, tensor in named_tensors(module).items():
                if name in names:
                    state[global_name(name, self.structure, subnet)] = tensor.detach().clone()
        return state

    def lacks_statistics(self, subnet: Subnet, local_params: tuple[str, ...]) -> bool:
        """Whether statistics of a subnet stay on the client, and its state has none.

        They stay if the net is the client's own, or if ``local_params`` names them and no weights.

        Args:
            subnet: What of the model is trained.
            local_params: Patterns of tensors that stay on the client.
        """
        local = self.structure.match_names(local_params)
        if any(name in local for name, _ in self.model.named_parameters()):
            return False
        if subnet.owner == PERSONAL:
            local |= self.structure.match_names(subnet.private)
        own = (self.structure.statistics & local) - self.structure.dropped_tensors(subnet)
        state = self._client_state
        return any(global_name(name, self.structure, subnet) not in state for name in own)

    def tensors(self, module: nn.Module, subnet: Subnet, built_for: Subnet) -> dict[str, Tensor]:
        """A copy of a module's tensors that are part of a subnet.

        Args:
            module: The module.
            subnet: The part that is wanted.
            built_for: The subnet that the module was built for, which contains the other.
        """
        own = {n: t.detach() for n, t in named_tensors(module).items()}
        names = self.structure.tensor_names(subnet)
        if subnet.shape == built_for.shape:
            return {n: own[n].clone() for n in names}
        where = index_cells_within(self.structure, built_for, subnet)
        return {n: view_cells(own[n], where[n]).clone() for n in names}


@dataclass
class _Shared:
    """What a worker keeps on its device, for all of its clients."""

    model: nn.Module | None = None
    given: Params | None = None  # global tensors on the host, and the same on the device
    moved: Params = field(default_factory=dict)
    resident: ResidentData | None = None


def _keep_data(data: ClientData, split: str) -> ClientData:
    return data


def _move_params(params: Params, device: torch.device) -> Params:
    if isinstance(params, SubnetTensors):
        return params.map(lambda tensor: tensor.to(device))
    return {name: tensor.to(device) for name, tensor in params.items()}
