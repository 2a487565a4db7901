"""Images may lie in memory with their channels last, where the model allows it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedquilt.structure.create import trace_structure
from fedquilt.structure.layout import supports_channels_last, to_channels_last, use_channels_last

IMAGE = torch.randn(2, 1, 6, 6)


class Viewing(nn.Module):
    """Flattens by ``view``, which refuses other layouts; only in training if asked."""

    def __init__(self, *, only_in_training: bool) -> None:
        super().__init__()
        self.only_in_training = only_in_training
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.out = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        strict = self.training or not self.only_in_training
        return self.out(x.view(len(x), -1) if strict else x.flatten(1))


def flattening() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))


def test_a_model_that_flattens_takes_channels_last_and_computes_the_same():
    torch.manual_seed(0)
    model = flattening().eval()
    assert trace_structure(model, IMAGE).channels_last
    expected = model(IMAGE)
    use_channels_last(model)
    torch.testing.assert_close(model(IMAGE), expected)


@pytest.mark.parametrize("only_in_training", [False, True])
def test_a_model_that_views_does_not(only_in_training):
    model = Viewing(only_in_training=only_in_training)
    assert not supports_channels_last(model, IMAGE)
    assert not trace_structure(model, IMAGE).channels_last


def test_only_images_are_laid_out():
    assert not supports_channels_last(nn.Linear(3, 2), torch.zeros(2, 3))
    rows, numbers = torch.zeros(2, 3), torch.zeros(2, 3, 4, 4, dtype=torch.int64)
    assert to_channels_last((rows, numbers))[0] is rows
    assert to_channels_last((rows, numbers))[1] is numbers


@pytest.mark.parametrize("channels", [1, 3])
def test_the_channel_axis_is_the_fastest_in_memory(channels):
    (image,) = to_channels_last((torch.randn(2, channels, 5, 4),))
    assert image.stride() == (5 * 4 * channels, 1, 4 * channels, channels)
    assert to_channels_last((image,))[0].data_ptr() == image.data_ptr()  # no copy


def test_looking_leaves_the_model_and_the_random_stream_alone():
    model = nn.Sequential(flattening(), nn.Dropout(0.5))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    torch.manual_seed(5)
    supports_channels_last(model, IMAGE)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_small_strided_pointwise_convolutions_are_trained_with_channels_first():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1, stride=2), nn.Flatten())
    assert supports_channels_last(net, torch.zeros(2, 3, 6, 6))
    narrow = nn.Sequential(nn.Conv2d(3, 7, 3), nn.ReLU(), nn.Conv2d(7, 8, 1, stride=2))
    assert not supports_channels_last(narrow, torch.zeros(2, 3, 6, 6))
    seen = []
    use_channels_last(narrow)
    narrow[0].register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0].stride()))
    narrow(torch.zeros(2, 3, 6, 6))
    assert seen == [torch.zeros(2, 3, 6, 6).stride()]


def test_gradients_of_flattened_images_have_their_layout():
    """A model's code goes through both at once, which is slow if they differ."""
    relu = nn.ReLU()
    net = nn.Sequential(nn.Conv2d(1, 4, 3), relu, nn.Flatten(), nn.Linear(64, 3))
    layouts = []
    relu.register_full_backward_pre_hook(lambda _, gradients: layouts.append(gradients[0].stride()))
    net(IMAGE).sum().backward()
    use_channels_last(net)
    net(IMAGE).sum().backward()
    assert layouts == [(64, 16, 4, 1), (64, 1, 16, 4)]
