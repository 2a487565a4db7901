"""What is told of a run that was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.evaluation.scores import SizeScore
from fedquilt.evaluation.targets import TargetResult
from fedquilt.report.page import RunReport
from fedquilt.report.records import LocalTest, Milestone
from fedquilt.report.run_report import build_report, compare_reports
from fedquilt.structure.subnet import Subnet

BUDGETS = (1.0, 1.0, 0.5)
NETS = tuple(Subnet.from_channels({"0": channels}) for channels in ([1, 2, 5], range(8), [3, 4]))
PARAMS = [3 * n + n + 2 * n + 2 for n in (3, 8, 2)]


@pytest.fixture(scope="module")
def people():
    torch.manual_seed(0)
    x, y = torch.rand(30, 3), torch.arange(30) % 2
    parts = [(x[i::3], y[i::3]) for i in range(3)]
    return fq.make_clients(parts, test=parts, budgets=BUDGETS)


def trained(folder, people, method):
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    pace = fq.Cadence(evaluate_every=1, test_locally=True)
    return fq.train(net, torch.zeros(2, 3), method, people, 3, workers=0, out=folder, cadence=pace)


def test_own_nets_are_told_with_what_they_sent(tmp_path, people):
    run = trained(tmp_path, people, fq.FedPA(subnets=NETS))
    story = build_report("x", run, people, workers=0)
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
    story = build_report("x", trained(tmp_path, people, fq.FedPA(subnets=NETS)))
    assert [net.params for net in story.nets] == PARAMS
    assert all(net.budget is None for net in (*story.nets, *story.architectures))
    assert story.distances.same_budget is None
    assert story.distances.all_pairs.pairs == 3


def test_where_nobody_chose_nets_are_what_was_trained(tmp_path, people):
    story = build_report(
        "x", trained(tmp_path, people, fq.HeteroFL(fraction=1.0)), people, workers=0
    )
    assert (story.architectures, story.distances) == ([], None)
    assert [net.params for net in story.nets] == [6 * n + 2 for n in (8, 8, 4)]
    assert [net.budget.width for net in story.nets] == list(BUDGETS)


def test_bytes_are_those_of_the_codes_and_rows_that_clients_really_sent(tmp_path, people):
    method = fq.STC(fraction=1.0, sparsity_up=0.1)
    story = build_report("x", trained(tmp_path, people, method), people, workers=0)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rounds = [record for record in records if "clients" in record]
    assert len(rounds) == 3
    assert all(sum(record["clients"]["bytes"]) == record["bytes_up"] for record in rounds)
    means = [
        sum(record["clients"]["bytes"][client] for record in rounds) / 3 for client in range(3)
    ]
    assert [score.bytes_per_round for score in story.clients] == pytest.approx(means)
    assert [net.bytes for net in story.nets] == pytest.approx(means)
    assert max(means) < 4 * PARAMS[1] / 2  # a fraction of all its weights


def test_shares_and_rates_and_layers_are_those_of_chosen_nets(tmp_path, people):
    story = build_report("x", trained(tmp_path, people, fq.FedPA(subnets=NETS)), people, workers=0)
    assert story.mean_shares["params"] == pytest.approx(sum(PARAMS) / 3 / 50)
    (rate,) = story.rates
    assert (rate.group, rate.size, rate.mean) == ("0", 8, pytest.approx((3 + 8 + 2) / 24))
    assert [layer.layer for layer in story.layers] == ["0", "2"]
    assert sum(layer.params for layer in story.layers) == pytest.approx(sum(PARAMS) / 3)
    assert [p.share for p in story.compressions] == [n / 50 for n in PARAMS]
    assert [p.divergence for p in story.compressions] == [0.0] * 3  # as many of one as of the other
    assert story.correlation is None
    assert story.traffic == {"up": 4 * sum(PARAMS) / 3, "down": 4 * sum(PARAMS) / 3}


def test_labels_that_differ_are_held_against_the_sizes_of_nets(tmp_path):
    x = torch.rand(30, 3)
    labels = [torch.arange(10) % 2, torch.zeros(10).long(), (torch.arange(10) < 2).long()]
    parts = [(x[i::3], y) for i, y in enumerate(labels)]
    people = fq.make_clients(parts, test=parts, budgets=BUDGETS)
    story = build_report("x", trained(tmp_path, people, fq.FedPA(subnets=NETS)), people, workers=0)
    even, one, few = (p.divergence for p in story.compressions)
    assert even == 0 < few < one < 1
    assert -1 < story.correlation < 1


def test_own_models_are_told_round_by_round_and_client_by_client(tmp_path, people):
    run = trained(tmp_path, people, fq.standalone())
    story = build_report("x", run)
    assert [(t.round, t.clients) for t in story.local_tests] == [(1, 3), (2, 3), (3, 3)]
    assert sum(story.local.values()) / 3 == pytest.approx(story.local_tests[-1].accuracy)
    assert story.local_tests[-1].accuracy == pytest.approx(run.scores[0].user_accuracy)
    assert (story.rates, story.layers, story.compressions) == ([], [], ())
    assert f"torch {torch.__version__}" in story.about["made with"]


def progress(*accuracies: float, phase: str = "train", first: int = 1) -> list[Milestone]:
    score = SizeScore(1.0, 1, 1, None, None, None, 1)
    return [
        Milestone(round, phase, 0.0, 0, replace(score, value=a, user_value=1.0))
        for round, a in enumerate(accuracies, start=first)
    ]


def test_rounds_to_targets_are_compared_with_the_first_run():
    slow = RunReport("slow", {}, (), progress(0.1, 0.2, 0.5, 0.5, 0.6))
    warm = [*progress(0.9, phase="warm-up"), *progress(0.2, 0.7, first=2)]  # another net's 0.9
    own = [LocalTest(1, "warm-up", 0.9, 3), LocalTest(2, "train", 0.6, 3)]
    fast = RunReport("fast", {}, (), warm, local_tests=own)
    found = compare_reports([slow, fast, RunReport("silent", {}, ())], [0.5, 0.65])
    assert [story.targets for story in found] == [
        [TargetResult(0.5, 3), TargetResult(0.65, None)],
        [TargetResult(0.5, 3, 2, 1.0), TargetResult(0.65, 3)],
        [TargetResult(0.5, None), TargetResult(0.65, None)],
    ]
    assert [story.targets for story in compare_reports([slow], [])] == [[]]
