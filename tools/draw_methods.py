"""Draws what clients train in each method into docs/images/methods/, from real runs.

    python tools/draw_methods.py [METHOD ...]

Each picture comes from a run of three rounds: a small net, random data, three clients that can
afford all of it, half and a quarter. An engine notes which subnets the server sends and which ones
come back. Nothing is drawn by hand: a method that cuts in another way has another picture.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch
from docsite.cells import LOCAL, SENT, Net, Panel, draw_picture, mark_cells, mark_matrix, to_grid
from torch import Tensor, nn

import fedquilt as fq

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images" / "methods"
BUDGETS = (1.0, 0.5, 0.25)
CHANNELS, CLASSES, SIDE = 8, 4, 8
TRAINING = fq.LocalTraining(lr=0.05, epochs=1, batch_size=8)
DEPTH_METHODS = ("depthfl", "nefl")  # they are drawn with a net of blocks
HIDDEN = ("*film*", "*attention*", "*bottleneck*")  # small parts that would crowd a picture
SETTINGS = {  # what makes a choice visible in a net of eight channels
    "adds": {"keep_fraction": 0.6, "keep_lr": 0.01},
    "nefl": {"tolerance": 0.1, "assignment": "fixed"},
    "splitmix": {"base": 0.25},
    "stc": {"sparsity_up": 0.02, "sparsity_down": 0.02},
}
LEGEND = {"1": "trained and sent", "": "not held"}
NESTED = {"3": "in three widths", "2": "in two", "1": "in the widest", "": "not held"}
KEPT = {"1": "trained and sent", LOCAL: "trained, stays on the client", "": "not held"}
CODED = {SENT: "trained, change sent", "1": "trained, change kept for later"}


class Block(nn.Module):
    """A convolution around which there is a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        """Adds to the input."""
        out: Tensor = x + torch.relu(self.norm(self.conv(x)))
        return out


def make_chain() -> nn.Module:
    """Three convolutions, each with its own channels, and a classifier."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, inputs in enumerate((1, CHANNELS, CHANNELS), start=1):
        layers[f"layer{number}"] = nn.Conv2d(inputs, CHANNELS, 3, padding=1)
        layers[f"norm{number}"] = nn.BatchNorm2d(CHANNELS)
        layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers | make_end())


def make_blocks() -> nn.Module:
    """A convolution, four residual blocks that can be left out, and a classifier."""
    layers = OrderedDict[str, nn.Module](
        stem=nn.Conv2d(1, CHANNELS, 3, padding=1),
        norm=nn.BatchNorm2d(CHANNELS),
        relu=nn.ReLU(),
        block=nn.Sequential(*(Block() for _ in range(4))),
    )
    return nn.Sequential(layers | make_end())


def make_end() -> OrderedDict[str, nn.Module]:
    """The layers behind the last convolution."""
    classes = nn.Linear(CHANNELS, CLASSES)
    return OrderedDict(pool=nn.AvgPool2d(SIDE), flat=nn.Flatten(), classes=classes)


@dataclass
class Recording:
    """What an engine was asked to do.

    Args:
        setup: What stays the same during the run.
        batches: The tasks and updates of each call.
        kept: Names of tensors that clients keep.
    """

    setup: fq.Setup | None = None
    batches: list[list[tuple[fq.Task, fq.Update]]] = field(default_factory=list)
    kept: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def get_setup(self) -> fq.Setup:
        """The setup of the run that was recorded."""
        assert self.setup is not None
        return self.setup

    def make_engine(self, setup: fq.Setup, population: fq.Population, folder: Path) -> fq.Engine:
        """An engine on this machine that notes what it does."""
        self.setup = setup
        batches, kept = self.batches, self.kept

        class RecordingEngine(fq.LocalEngine):
            def run(
                self, tasks: Sequence[fq.Task], *, enough: int | None = None
            ) -> Iterator[fq.Update | fq.Failure]:
                batches.append([])
                for task, result in zip(tasks, super().run(tasks, enough=enough), strict=True):
                    assert isinstance(result, fq.Update)
                    batches[-1].append((task, result))
                    kept[task.client] = tuple(self.read_state(task.client) or ())
                    yield result

        data = {"train": population.train, "test": population.test}
        return RecordingEngine(setup.model, setup.structure, data, workers=0, folder=folder)


def record_run(name: str) -> tuple[fq.Method, Recording]:
    """Trains three rounds with a method."""
    torch.manual_seed(0)
    model = make_blocks() if name in DEPTH_METHODS else make_chain()
    inputs, labels = torch.rand(96, 1, SIDE, SIDE), torch.arange(96) % CLASSES
    inputs = (inputs + labels[:, None, None, None] / CLASSES) / 2  # there is something to learn
    clients = fq.make_clients(
        (inputs, labels), test=(inputs, labels), count=3, budgets=BUDGETS, partition="classes:3"
    )
    method = fq.METHODS[name](TRAINING, fraction=1.0, **SETTINGS.get(name, {}))
    recording = Recording()
    fq.train(model, inputs[:1], method, clients, rounds=3, engine=recording.make_engine)
    return method, recording


def list_rounds(method: fq.Method, recording: Recording) -> list[list[tuple[fq.Task, fq.Update]]]:
    """The rounds of the phase in which clients train for good."""
    done = [batch for batch in recording.batches if all(t.client != -1 for t, _ in batch)]
    start = 0
    for phase in method.phases(recording.get_setup()):
        if phase.name == "train":
            return done[start : start + phase.rounds]
        start += phase.rounds
    raise ValueError(f"{method} has no phase called train")


def make_panel(
    method: fq.Method, recording: Recording, task: fq.Task, update: fq.Update, owners: Sequence[str]
) -> Panel:
    """What a client holds in a round."""
    setup = recording.get_setup()
    structure, kept = setup.structure, recording.kept.get(task.client, ())
    shown = [
        name
        for name, shape in structure.shapes.items()
        if len(shape) > 1 and not any(fnmatch(name, pattern) for pattern in HIDDEN)
    ]
    subnets = update.subnets or task.subnets
    if owners:  # every base is a net of its own
        trained = {subnet.owner for subnet in subnets}
        base = mark_cells(structure, subnets[:1], shown)
        nets = tuple(base if owner in trained else blank(base) for owner in owners)
        return Panel(nets, tuple(f"base {owner}" for owner in owners))
    net = dict(mark_cells(structure, subnets, shown))
    for name in structure.match_names(method.local_params) & net.keys():
        net[name] = mark_matrix(net[name], LOCAL)
    decoder = method.aggregation(setup, "train").decoder
    if decoder.gives_changes:
        state = fq.State(0, "train", dict(setup.model.state_dict()))
        (change,) = decoder.decode(setup, state, update).params
        for name in change.keys() & net.keys():
            sent = to_grid((change[name] != 0).long())
            pairs = zip(net[name], sent, strict=True)
            net[name] = tuple(
                tuple(SENT if s else cell for cell, s in zip(*rows, strict=True)) for rows in pairs
            )
    if personal := {name: mark_matrix(net[name], LOCAL) for name in net if f"{name}@own" in kept}:
        return Panel((net, personal), ("shared", "its own"))
    return Panel((net,))


def blank(net: Net) -> Net:
    """A net of which nothing is held."""
    return {name: tuple(("",) * len(row) for row in grid) for name, grid in net.items()}


def draw_method(name: str) -> str:
    """The picture of a method."""
    method, recording = record_run(name)
    setup = recording.get_setup()
    rounds = list_rounds(method, recording)
    subnets = [s for batch in rounds for t, u in batch for s in u.subnets or t.subnets]
    is_split = len({s.owner for s in subnets}) > 1 and all(s.private == ("*",) for s in subnets)
    owners = sorted({subnet.owner for subnet in subnets}) if is_split else []
    rows: dict[str, list[Panel]] = {}
    for batch in rounds[:2]:
        for task, update in batch:
            panel = make_panel(method, recording, task, update, owners)
            rows.setdefault(label_client(setup, task.client), []).append(panel)
    heads = ["round 1", "round 2"]
    if all(panels[0] == panels[1] for panels in rows.values()):
        rows, heads = {label: panels[:1] for label, panels in rows.items()}, ["in every round"]
    return draw_picture(rows, heads, choose_legend(rows))


def label_client(setup: fq.Setup, number: int) -> str:
    """Who stands at the start of a row."""
    if number < 0:
        return "all data"
    width = setup.clients_by_id[number].budget.width
    return f"budget {width:g}"


def choose_legend(rows: dict[str, list[Panel]]) -> dict[str, str]:
    """What the colors of a picture mean; those that are not in it are left out."""
    nets = [net for panels in rows.values() for panel in panels for net in panel.nets]
    kinds = {cell for net in nets for grid in net.values() for row in grid for cell in row}
    signs = {SENT: CODED, LOCAL: KEPT, "2": NESTED, "1": LEGEND}
    legend = next(legend for sign, legend in signs.items() if sign in kinds)
    return {kind: text for kind, text in legend.items() if kind in kinds}


def main() -> None:
    """Draws the methods that are named, or all."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or fq.METHODS:
        (IMAGES / f"{name}.svg").write_text(draw_method(name))


if __name__ == "__main__":
    main()
