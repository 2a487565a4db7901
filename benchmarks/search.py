"""The search of FedCS against the greedy search that it stands for, on the same client.

    python benchmarks/search.py                 # Fashion-MNIST, a MobileNetV2, some minutes
    python benchmarks/search.py --growth        # how the cost grows

The plain greedy search builds every candidate and evaluates it on all of the client's images, at
every step. Ours looks at views of one net, remembers the outputs of unchanged blocks, asks a layer
again only if it may be the best, and looks at no more than 256 images. Both end within one budget;
accuracies are of the nets they find, cut from the same super-network, on the client's images and on
test images. Wanted: at least 10 times faster, at most half a point less.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

from fedquilt.data import ClientData, load_dataset, to_examples
from fedquilt.federation.client import Task
from fedquilt.models.apfl import MobileNetV2
from fedquilt.structure.budget import Budget
from fedquilt.structure.cost import CostTable
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import Params, build_module
from fedquilt.structure.structure import Structure
from fedquilt.structure.subnet import Subnet
from fedquilt.structure.tensors import named_tensors
from fedquilt.training.context import ClientContext
from fedquilt.training.sandwich import Sandwich
from fedquilt.training.search import Limits, Search, shrink_group
from fedquilt.training.settings import LocalTraining
from fedquilt.training.tracking import without_running_stats

BATCH = 128


def main() -> None:
    """Prints both searches, or how their cost grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="fashion-mnist")
    parser.add_argument("--images", type=int, default=256, help="of the client")
    parser.add_argument("--warm", type=int, default=6000, help="images that the net is trained on")
    parser.add_argument("--multiplier", type=float, default=0.35)
    parser.add_argument("--budget", type=float, default=0.8, help="a width")
    parser.add_argument("--again", type=int, default=2, help="layers asked again at every step")
    parser.add_argument("--growth", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.growth:
        _growth()
        return
    source = load_dataset(options.source)
    client = source.train.select(torch.randperm(len(source.train))[: options.images].numpy())
    test = source.test.select(torch.arange(min(2000, len(source.test))).numpy())
    channels = client.inputs.shape[1] if client.inputs.ndim == 4 else 1
    net = MobileNetV2(in_channels=channels, multiplier=options.multiplier, stem_stride=2)
    warm = source.train.select(torch.randperm(len(source.train))[: options.warm].numpy())
    rows = _compared(
        net,
        client,
        test,
        Budget(options.budget),
        warm,
        whole=("head.0",),
        epochs=6,
        again=options.again,
    )
    for name, (seconds, evaluations, subnet, accuracies) in rows.items():
        own, other = accuracies
        print(
            f"{name:>7}: {seconds:8.1f} s, {evaluations:7.0f} evaluations, "
            f"accuracy {100 * own:.2f} % (client), {100 * other:.2f} % (test); {subnet}"
        )
    print(f"ours is {rows['greedy'][0] / rows['ours'][0]:.1f} times faster")


Row = tuple[float, float, Subnet, tuple[float, float]]


def _compared(
    net: nn.Module,
    client: ClientData,
    test: ClientData,
    budget: Budget,
    warm: ClientData,
    *,
    whole: tuple[str, ...] = (),
    epochs: int = 2,
    again: int = 2,
) -> dict[str, Row]:
    """Both searches on one trained super-network."""
    example = client.batch(torch.arange(2))[0]
    structure = trace_structure(net, example)
    bench = ClientContext(net, structure, {"train": {0: client}})
    search = Search(budget, whole=whole, again=again)
    params = _warm(ClientContext(net, structure, {"train": {0: warm}}), epochs, whole)
    limits = Limits.of(search, CostTable(net, structure, example[:1]), structure)
    rows: dict[str, Row] = {}
    started = time.perf_counter()
    update = search.run(Task(0, (Subnet(),), params, search, seed=0), bench).update
    seconds, found = time.perf_counter() - started, update.subnets[0].shape
    rows["ours"] = (seconds, update.metrics["evaluations"], found, (0.0, 0.0))
    started = time.perf_counter()
    plain, count = _greedy(net, structure, params, _batches(client), limits, search)
    rows["greedy"] = (time.perf_counter() - started, count, plain, (0.0, 0.0))
    for name, (seconds, count, subnet, _) in rows.items():
        own, other = (
            _hits(net, structure, params, subnet, _batches(data)) / len(data)
            for data in (client, test)
        )
        rows[name] = (seconds, count, subnet, (own, other))
    return rows


def _warm(bench: ClientContext, epochs: int, whole: tuple[str, ...]) -> Params:
    """A super-network that was trained a little, as in a warm-up."""
    settings = LocalTraining(lr=0.05, epochs=epochs, batch_size=32, max_grad_norm=None)
    recipe = Sandwich(settings, settings.lr, whole=whole)
    params = named_tensors(bench.model)
    sent = Subnet().excluding(":statistics", "*num_batches_tracked")
    update = recipe.run(Task(0, (sent,), params, recipe, seed=0), bench).update
    return {**{n: t.detach() for n, t in params.items()}, **update.params[0]}


def _greedy(
    net: nn.Module,
    structure: Structure,
    params: Params,
    batches: list[tuple[Tensor, Tensor]],
    limits: Limits,
    search: Search,
) -> tuple[Subnet, int]:
    """Algorithm 1, lines 14-21, as it is written."""
    now, count = Subnet(), 0
    least = {
        g: structure.kept_count(search.smallest_subnet(structure), g)
        for g in search.shrinkable_groups(structure)
    }
    while not limits.are_met(now):
        narrower = {
            g: shrink_group(structure, now, g, search.ratio, n)
            for g, n in least.items()
            if structure.kept_count(now, g) > n
        }
        count += len(narrower)
        hits = {g: _hits(net, structure, params, s, batches) for g, s in narrower.items()}
        best = max(narrower, key=lambda g: (hits[g], -limits.pressure(narrower[g])))
        now = narrower[best]
    return now, count


@torch.no_grad()
def _hits(
    net: nn.Module,
    structure: Structure,
    params: Params,
    subnet: Subnet,
    batches: list[tuple[Tensor, Tensor]],
) -> int:
    small = without_running_stats(build_module(net, structure, subnet, params)).eval()
    return sum(int((small(x).argmax(-1) == y).sum()) for x, y in batches)


def _batches(data: ClientData) -> list[tuple[Tensor, Tensor]]:
    return [data.batch(rows) for rows in torch.arange(len(data)).split(BATCH)]


class _Stack(nn.Module):
    """So many convolutions, one after another."""

    def __init__(self, layers: int, width: int = 16) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for number in range(layers):
            before = width if number else 1
            parts.append(
                nn.Sequential(
                    nn.Conv2d(before, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                )
            )
        self.features = nn.Sequential(*parts)
        self.classifier = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.features(x).mean((2, 3)))


def _growth() -> None:
    """Seconds of both with layers, images and how much is cut, one varied at a time."""
    usual = {"layers": 8, "images": 256, "budget": 0.7}
    for name, values in (
        ("layers", (4, 8, 16)),
        ("images", (128, 256, 512)),
        ("budget", (0.9, 0.7, 0.5)),
    ):
        for value in values:
            at = {**usual, name: value}
            data = _drawn(int(at["images"]))
            net = _Stack(int(at["layers"]))
            rows = _compared(net, data, data, Budget(at["budget"]), _drawn(1024))
            ours, plain = rows["ours"], rows["greedy"]
            print(
                f"{name} = {value:<4} ours {ours[0]:6.2f} s, {ours[1]:5.0f} evaluations; "
                f"greedy {plain[0]:6.2f} s, {plain[1]:5.0f}; {plain[0] / ours[0]:.1f} times faster"
            )


def _drawn(count: int) -> ClientData:
    """Stripes in four directions, with noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 4
    place = torch.arange(12.0)
    across, down = place.view(1, 12), place.view(12, 1)
    waves = torch.stack(
        [torch.sin(a * across + b * down) for a, b in ((1, 0), (0, 1), (1, 1), (1, -1))]
    )
    noise = torch.randn(count, 1, 12, 12, generator=generator)
    return to_examples(((waves[y].unsqueeze(1) + noise), y))


if __name__ == "__main__":
    main()
