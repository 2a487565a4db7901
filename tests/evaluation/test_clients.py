"""Who trained what: plans made again, against sums by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.data.examples import as_examples
from fedquilt.evaluation.clients import (
    client_scores,
    history,
    label_divergences,
    trained_shares,
)
from fedquilt.federation.client import Client
from fedquilt.structure.budget import Budget

WIDTHS = (0.25, 0.5, 1.0, 1.0)
GROUPS = ("a", "a", "b", "b")


@pytest.fixture(scope="module")
def setup() -> fq.Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    example = torch.zeros(2, 3)
    clients = tuple(
        Client(i, 10, (0, 1), Budget(w), g)
        for i, (w, g) in enumerate(zip(WIDTHS, GROUPS, strict=True))
    )
    return fq.Setup(model, fq.Structure.trace(model, example), example, clients, 6, seed=3)


def params(hidden: int) -> int:
    return 3 * hidden + hidden + 2 * hidden + 2


def test_nested_widths_leave_most_of_the_net_untrained_by_the_weak(setup):
    method = fq.HeteroFL(fraction=1.0)
    shares = trained_shares(setup, method)
    assert shares == {"a": params(4) / params(8), "b": 1.0}


def test_every_base_comes_to_every_group(setup):
    method = fq.SplitMix(base=0.25, together=False)
    slim = method.prepared(setup)
    assert trained_shares(slim, method) == {"a": 1.0, "b": 1.0}
    short = replace(slim, rounds=1)  # group a trains 1 + 2 bases at most
    assert 0.25 <= trained_shares(short, method)["a"] <= 0.75


def test_what_a_client_sends_and_computes_grows_with_its_budget(setup):
    method = fq.SplitMix(base=0.25, together=False)
    scores = client_scores(method.prepared(setup), method, {2: 0.5})
    assert [s.params_per_round for s in scores] == [n * params(2) for n in (1, 2, 4, 4)]
    assert [s.bytes_per_round for s in scores] == [n * 4 * params(2) for n in (1, 2, 4, 4)]
    assert [s.macs for s in scores] == [n * (3 * 2 + 2 * 2) for n in (1, 2, 4, 4)]
    assert [s.rounds for s in scores] == [6] * 4
    assert [s.accuracy for s in scores] == [None, None, 0.5, None]
    assert [(s.group, s.budget) for s in scores] == list(zip(GROUPS, WIDTHS, strict=True))


def test_slimmable_clients_compute_every_width_but_send_the_widest(setup):
    scores = client_scores(setup, fq.SHeteroFL())
    assert [s.params_per_round for s in scores] == [params(n) for n in (2, 4, 8, 8)]
    assert [s.bytes_per_round for s in scores] == [4 * params(n) for n in (2, 4, 8, 8)]
    assert [s.macs for s in scores] == [5 * n for n in (2, 2 + 4, 2 + 4 + 8, 2 + 4 + 8)]


def test_means_are_over_the_rounds_that_a_client_took_part_in(setup):
    method = fq.HeteroFL(fraction=0.5, assignment="dynamic", widths=(0.25, 1.0))
    tasks = [task for tasks in history(setup, method) for task in tasks]
    kinds = set()
    for score in client_scores(setup, method):
        own = [task.subnets[0] for task in tasks if task.client == score.client]
        sent = [4 * params(setup.structure.kept(subnet, "0")) for subnet in own]
        assert (score.rounds, score.bytes_per_round) == (len(own), sum(sent) / len(own))
        kinds.add(len(set(sent)))
    assert 2 in kinds  # some client trained both widths


@pytest.mark.parametrize("method", [fq.SplitMix(fraction=0.5, base=0.25, together=False)])
def test_the_plans_are_those_of_the_run(setup, method):
    slim = method.prepared(setup)
    x, y = torch.rand(40, 3), torch.arange(40) % 2
    people = fq.clients([(x[i::4], y[i::4]) for i in range(4)], budgets=WIDTHS)
    seen = []

    class Recording:
        def __init__(self, setup, people, folder) -> None:
            from fedquilt.engines.local import LocalEngine

            self.inner = LocalEngine(setup.model, setup.structure, people.data, workers=0)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def run(self, tasks):
            seen.append([(t.client, t.subnets) for t in tasks])
            return self.inner.run(tasks)

    fq.train(setup.model, setup.example, method, people, 6, seed=3, engine=Recording)
    planned = [[(t.client, t.subnets) for t in tasks] for tasks in history(slim, method)]
    assert planned == [tasks for tasks in seen if tasks][: len(planned)]


def test_clients_that_choose_send_their_choice_and_receive_the_whole(setup):
    own = {0: fq.Subnet.of({"0": [1, 6]}), 2: fq.Subnet.of({"0": [0, 2, 5]})}
    scores = client_scores(setup, fq.ADDS(fraction=1.0), chosen=own)
    assert [s.params_per_round for s in scores] == [params(n) for n in (2, 8, 3, 8)]
    assert [s.bytes_per_round for s in scores] == [4 * params(n) for n in (2, 8, 3, 8)]
    assert [s.params_received for s in scores] == [params(8)] * 4
    assert [s.macs for s in scores] == [5 * 8] * 4  # it is the whole net that they train


def test_before_they_chose_clients_sent_what_they_trained(setup):
    method = fq.APFL(fraction=1.0, warm_up=0.5)  # by those that can afford the whole: 2 and 3
    own = {i: fq.Subnet.of({"0": range(i + 1)}) for i in range(4)}
    scores = client_scores(setup, method, chosen=own)
    searched = params(8)  # one round, in which the whole net is received
    assert [s.rounds for s in scores] == [7, 7, 10, 10]
    for score, warm_up in zip(scores, (0, 0, 3, 3), strict=True):
        trained = 6 * params(score.client + 1) + warm_up * params(8)
        assert score.params_received * score.rounds == pytest.approx(trained + searched)


def test_labels_are_compared_with_all_classes_alike(setup):
    def held(*labels: int):
        return as_examples((torch.zeros(len(labels), 3), torch.tensor(labels)))

    found = label_divergences(setup, {4: held(0, 1, 1, 0), 1: held(1, 1, 1)})
    one_of_two = (
        math.log2(1 / 0.75) + 0.5 * math.log2(0.5 / 0.25) + 0.5 * math.log2(0.5 / 0.75)
    ) / 2
    assert found == {4: 0.0, 1: pytest.approx(one_of_two)}
