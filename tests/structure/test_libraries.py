"""Nets of a library that writes its layers as torch.fx cannot read them, from configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from fedquilt.structure.cost import compute_cost
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import build_module
from fedquilt.structure.tensors import named_tensors

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
PIXELS = torch.zeros(2, 3, 16, 16)
SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
TEXT: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 10,
    **SPECIAL,
}


class Logits(nn.Module):
    """What a net of the library gives is a record; a model returns its logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).logits


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=12, n_embd=8, n_layer=3, n_head=2, n_positions=10, use_cache=False, **SPECIAL
    )
    return hf.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    sizes = {name: TEXT[name] for name in ("hidden_size", "num_hidden_layers", "intermediate_size")}
    config = hf.ViTConfig(num_attention_heads=2, image_size=16, patch_size=4, num_labels=5, **sizes)
    return hf.ViTForImageClassification(config)


NETS: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "vit": (vit, PIXELS, "net.vit.layers"),
    "bert": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(num_labels=5, **TEXT)),
        TOKENS,
        "net.bert.encoder.layer",
    ),
    "gpt-2": (gpt2, TOKENS, "net.transformer.h"),
    "llama": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(use_cache=False, **TEXT)),
        TOKENS,
        "net.model.layers",
    ),
    "deberta": (
        lambda: hf.DebertaV2ForSequenceClassification(
            hf.DebertaV2Config(num_labels=5, relative_attention=True, **TEXT)
        ),
        TOKENS,
        "net.deberta.encoder.layer",
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_layers_of_the_library_are_blocks_and_channels_are_cut(name):
    make, example, stack = NETS[name]
    torch.manual_seed(0)
    model = Logits(make()).eval()
    structure = trace_structure(model, example)
    assert list(structure.blocks) == [f"{stack}.{i}" for i in range(3)]
    shallow = structure.subnet(width=0.5, depth=0.5)
    assert shallow.skipped == (f"{stack}.2",)
    small = build_module(model, structure, shallow)
    assert small(example).shape == model(example).shape
    assert not any(n.startswith(f"{stack}.2.") for n in named_tensors(small))
    whole = compute_cost(model, structure, structure.subnet(), example)
    assert (
        compute_cost(model, structure, structure.subnet(0.5), example).params < 0.5 * whole.params
    )

    without = build_module(model, structure, structure.subnet().without_blocks(f"{stack}.1"))
    layer = model.get_submodule(f"{stack}.1")

    def answer_the_input(module: nn.Module, given: Any, output: Any) -> Any:
        return (given[0], *output[1:]) if isinstance(output, tuple) else given[0]

    layer.register_forward_hook(answer_the_input)
    torch.testing.assert_close(without(example), model(example))
