"""What is said of submodels, block by block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.evaluation.blocks import compute_mean_weights, read_step_sizes
from fedquilt.figures import figure as figures
from fedquilt.report import subnet_plots


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


@pytest.fixture(scope="module")
def case() -> tuple[fq.Setup, fq.NeFL, fq.State]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 1), Residual(), Residual(), nn.Flatten(), nn.Linear(64, 2))
    example = torch.zeros(2, 1, 4, 4)
    method = fq.NeFL(scaling="prefix", gammas=(0.4, 1.0))
    structure = fq.trace_structure(net, example)
    setup = method.prepare_model(fq.Setup(net, structure, example, (), 1, 0))
    state = method.start(setup)
    own = {"1.step@0.4": torch.tensor(2.5), "1.step@1": torch.tensor(0.5)}
    return setup, method, replace(state, params={**state.params, **own})


def test_steps_are_those_of_each_size_and_of_the_blocks_that_it_keeps(case):
    # the step of block 2 was never trained: it is still the shared one
    assert read_step_sizes(*case) == {"1": {"1": 0.5, "2": 1.0}, "0.4": {"1": 2.5}}


def test_weights_are_averaged_over_a_blocks_kernels_without_its_biases(case):
    found = compute_mean_weights(*case)
    kernel = case[2].params["1.conv.weight"].numpy()
    assert found["0.4"] == {"1": pytest.approx(np.abs(kernel).mean(), rel=1e-6)}
    assert set(found["1"]) == {"1", "2"}


def test_a_net_without_blocks_has_nothing_to_tell():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    example = torch.zeros(2, 3)
    setup = fq.Setup(net, fq.trace_structure(net, example), example, (), 1, 0)
    method = fq.FedAvg()
    state = method.start(setup)
    assert read_step_sizes(setup, method, state) == compute_mean_weights(setup, method, state) == {}
    assert subnet_plots.plot_by_block("steps", "step", {}) == []


def test_a_picture_has_a_series_for_each_size_and_a_gap_for_each_skipped_block(case):
    (picture,) = subnet_plots.plot_by_block("steps", "step", read_step_sizes(*case))
    assert isinstance(picture, figures.Bars)
    assert picture.labels == ("1", "2")
    assert picture.series == {"x1": [0.5, 1.0], "x0.4": [2.5, 0.0]}
