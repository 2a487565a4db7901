"""What is told of a run that was."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.report.stories import told
from fedquilt.structure.subnet import Subnet

BUDGETS = (1.0, 1.0, 0.5)
NETS = tuple(Subnet.of({"0": channels}) for channels in ([1, 2, 5], range(8), [3, 4]))
PARAMS = [3 * n + n + 2 * n + 2 for n in (3, 8, 2)]


@pytest.fixture(scope="module")
def people():
    torch.manual_seed(0)
    x, y = torch.rand(30, 3), torch.arange(30) % 2
    parts = [(x[i::3], y[i::3]) for i in range(3)]
    return fq.clients(parts, test=parts, budgets=BUDGETS)


def trained(folder, people, method):
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    pace = fq.Pace(evaluate_every=1)
    return fq.train(net, torch.zeros(2, 3), method, people, 3, workers=0, out=folder, pace=pace)


def test_own_nets_are_told_with_what_they_sent(tmp_path, people):
    run = trained(tmp_path, people, fq.FedPA(subnets=NETS))
    story = told("x", run, people, workers=0)
    assert [net.channels for net in story.architectures] == [{"0": n} for n in (3, 8, 2)]
    assert story.distances.same_budget.pairs == 1
    assert story.distances.same_budget.channels == 5
    assert story.distances.all_pairs.channels == pytest.approx((5 + 1 + 6) / 3)
    assert [net.params for net in story.nets] == PARAMS
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rounds = [r for r in records if "scores" not in r]
    assert sum(net.bytes for net in story.nets) == rounds[0]["bytes_up"] == 4 * sum(PARAMS)
    assert story.mean_costs["params"] == pytest.approx(sum(PARAMS) / 3)
    assert [m.bytes for m in story.progress] == [8 * sum(PARAMS) * r for r in (1, 2, 3)]
    assert all(m.score.personal_accuracy is not None for m in story.progress)


def test_without_data_nobody_knows_what_clients_can_afford(tmp_path, people):
    story = told("x", trained(tmp_path, people, fq.FedPA(subnets=NETS)))
    assert [net.params for net in story.nets] == PARAMS
    assert all(net.budget is None for net in (*story.nets, *story.architectures))
    assert story.distances.same_budget is None
    assert story.distances.all_pairs.pairs == 3


def test_where_nobody_chose_nets_are_what_was_trained(tmp_path, people):
    story = told("x", trained(tmp_path, people, fq.HeteroFL(fraction=1.0)), people, workers=0)
    assert (story.architectures, story.distances) == ([], None)
    assert [net.params for net in story.nets] == [6 * n + 2 for n in (8, 8, 4)]
    assert [net.budget.width for net in story.nets] == list(BUDGETS)
