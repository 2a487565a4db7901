"""Tracing large models: processor seconds, and the memory it takes beside the model, in models.

    python benchmarks/trace.py [--net NAME ...] [--save]

Each net is traced on one example in fresh processes with one thread. One measures the seconds of
``trace_structure``, as the processor counts them. Another one measures how far the largest resident
set grows over what the process held before, while freed memory is given back to the system at once
(wanted: below 10 seconds and below twice the model for every net of 100 M parameters).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from resident import from_here, largest
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.models import make_model

WORDS = torch.arange(64)[None] % 50


class Encoder(nn.Module):
    """Embedded words, PyTorch's own encoder, classes."""

    def __init__(
        self, dim: int = 768, layers: int = 12, words: int = 20_000, heads: int = 12
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.fc = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.encoder(self.embed(x)).mean(1))
        return y


class CausalAttention(nn.Module):
    """As GPT-2 has it: one projection for queries, keys and values, and a mask in a buffer."""

    def __init__(self, dim: int, heads: int, places: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.scale = heads, dim // heads, (dim // heads) ** -0.5
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("mask", torch.ones(places, places, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        shape = (b, t, self.heads, self.head_dim)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) * self.scale
        weights = scores.masked_fill(~self.mask[:t, :t], float("-inf")).softmax(-1)
        y: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return y


class GPTLayer(nn.Module):
    """Attention and a net over channels, each beside a shortcut."""

    def __init__(self, dim: int, heads: int, places: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = CausalAttention(dim, heads, places)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """GPT-2 by hand, its decoder tied to its embedding."""

    def __init__(self, dim: int = 768, layers: int = 12, words: int = 50_257) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(words, dim), nn.Embedding(1024, dim)
        self.layers = nn.Sequential(*(GPTLayer(dim, 12, 1024) for _ in range(layers)))
        self.norm, self.decode = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.places(torch.arange(x.shape[1]))
        y: Tensor = self.decode(self.norm(self.layers(x)))
        return y


class Bottleneck(nn.Module):
    """A wide residual block of three convolutions."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        sizes = [(dim, inner, 1), (inner, inner, 3), (inner, dim, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, padding=k // 2) for a, b, k in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _ in sizes)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = F.relu(norm(conv(y)))
        return x + y


def wide_resnet(dim: int = 1024, inner: int = 768, blocks: int = 14) -> nn.Module:
    """Batch normalisation only, so that every subnet equals the masked net."""
    stem = [nn.Conv2d(3, dim, 3, 2, 1), nn.BatchNorm2d(dim), nn.ReLU()]
    layers = [Bottleneck(dim, inner) for _ in range(blocks)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(dim, 10)]
    return nn.Sequential(*stem, *layers, *end)


def mlp(width: int = 4096, layers: int = 6) -> nn.Module:
    """Large layers, and nothing else."""
    sizes = [3072, *[width] * layers]
    hidden = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def hugging_face_gpt() -> nn.Module:
    """GPT-2 of the transformers library, which is imported for this net alone."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


NETS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "vit-b16": (lambda: make_model("vit-b16", {}), torch.zeros(1, 3, 224, 224)),
    "encoder": (Encoder, WORDS),
    "gpt-2": (GPT, WORDS),
    "gpt-2 of transformers": (hugging_face_gpt, WORDS),
    "wide resnet": (wide_resnet, torch.zeros(1, 3, 16, 16)),
    "mlp": (mlp, torch.zeros(1, 3072)),
}


def measured(name: str, *, memory: bool) -> dict[str, float]:
    """One net, in this process."""
    torch.set_num_threads(1)
    if memory:
        ctypes.CDLL("libc.so.6").mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back
    make_net, example = NETS[name]
    model = make_net().eval()
    with torch.no_grad():
        model(example)  # kernels are loaded
    size = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    weights = sum(p.numel() for p in model.parameters())
    before, start = from_here(), time.process_time()
    structure = fq.trace_structure(model, example)
    seconds, grown = time.process_time() - start, largest() - before
    half = fq.compute_cost(model, structure, structure.subnet(0.5), example).params
    found = {"weights": weights, "half": half / weights}
    return {**found, "memory": grown / size} if memory else {**found, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", action="append", choices=NETS, help="default: all of them")
    parser.add_argument("--alone", choices=("seconds", "memory"), help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="store the figures")
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measured(options.net[0], memory=options.alone == "memory")))
        return
    from record import Recorder, Table  # not in the process that is measured

    recorder = Recorder("trace", options.save)
    cells = []
    for name in options.net or NETS:
        got: dict[str, float] = {}
        for what in ("seconds", "memory"):
            command = [sys.executable, __file__, "--net", name, "--alone", what]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            got |= json.loads(done.stdout)
        numbers = f"{got['weights'] / 1e6:.1f} M", f"{got['seconds']:.1f}", f"{got['memory']:.2f}"
        cells.append((name, *numbers, f"{got['half']:.2f}"))
    header = "net", "weights", "seconds", "memory beside it, in models", "weights at half width"
    notes = (
        "One example, one thread, two fresh processes for each net; processor seconds. Images "
        "have 224 x 224 points for vit-b16, texts have 64 words.",
        "Target: below 10 seconds and below 2 models for every net of 100 M weights.",
    )
    recorder.finish(Table("Tracing large models", header, cells, notes))


if __name__ == "__main__":
    main()
