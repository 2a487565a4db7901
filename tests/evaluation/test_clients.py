"""Who trained what: records of rounds, against sums by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.evaluation.clients import (
    ClientRecord,
    compute_client_scores,
    compute_label_divergences,
    compute_trained_fractions,
)
from fedquilt.federation.client import Client, derive_seed
from fedquilt.federation.state import sample_cohort
from fedquilt.runs.accounting import count_subnet_bytes
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
    return fq.Setup(model, fq.trace_structure(model, example), example, clients, 6, seed=3)


def play(setup, method, chosen=None):
    """The records of a run in which every client returns what it was asked for, or its choice."""
    state = replace(method.start(setup), chosen_subnets=chosen or {})
    *early, _ = (phase.rounds for phase in method.phases(setup) if not phase.is_closing)
    records = []
    for phase in method.phases(setup):
        for _ in range(0 if phase.is_closing else phase.rounds):
            state = replace(state, phase=phase.name)
            cohort = sample_cohort(setup.clients, phase, derive_seed(setup.seed, state.round))
            for task in method.plan(setup, state, cohort):
                is_own = task.client in (chosen or {}) and state.round >= sum(early)
                returned = (chosen[task.client],) if is_own else task.subnets
                size = sum(count_subnet_bytes(setup, subnet) for subnet in returned)
                records.append(ClientRecord(task.client, task.subnets, returned, size, {}))
            state = replace(state, round=state.round + 1)
    return records


def params(hidden: int) -> int:
    return 3 * hidden + hidden + 2 * hidden + 2


def test_nested_widths_leave_most_of_the_net_untrained_by_the_weak(setup):
    method = fq.HeteroFL(fraction=1.0)
    shares = compute_trained_fractions(setup, play(setup, method))
    assert shares == {"a": params(4) / params(8), "b": 1.0}


def test_every_base_comes_to_every_group(setup):
    method = fq.SplitMix(base=0.25, stacked=False)
    slim = method.prepare_model(setup)
    assert compute_trained_fractions(slim, play(slim, method)) == {"a": 1.0, "b": 1.0}
    short = replace(slim, rounds=1)  # group a trains 1 + 2 bases at most
    assert 0.25 <= compute_trained_fractions(short, play(short, method))["a"] <= 0.75


def test_what_a_client_sends_and_computes_grows_with_its_budget(setup):
    method = fq.SplitMix(base=0.25, stacked=False)
    slim = method.prepare_model(setup)
    scores = compute_client_scores(slim, play(slim, method), {2: 0.5})
    assert [s.params_per_round for s in scores] == [n * params(2) for n in (1, 2, 4, 4)]
    assert [s.bytes_per_round for s in scores] == [n * 4 * params(2) for n in (1, 2, 4, 4)]
    assert [s.macs for s in scores] == [n * (3 * 2 + 2 * 2) for n in (1, 2, 4, 4)]
    assert [s.rounds for s in scores] == [6] * 4
    assert [s.value for s in scores] == [None, None, 0.5, None]
    assert [(s.group, s.budget) for s in scores] == list(zip(GROUPS, WIDTHS, strict=True))


def test_slimmable_clients_compute_every_width_but_send_the_widest(setup):
    scores = compute_client_scores(setup, play(setup, fq.SHeteroFL()))
    assert [s.params_per_round for s in scores] == [params(n) for n in (2, 4, 8, 8)]
    assert [s.bytes_per_round for s in scores] == [4 * params(n) for n in (2, 4, 8, 8)]
    assert [s.macs for s in scores] == [5 * n for n in (2, 2 + 4, 2 + 4 + 8, 2 + 4 + 8)]


def test_means_are_over_the_rounds_that_a_client_took_part_in(setup):
    method = fq.HeteroFL(fraction=0.5, assignment="dynamic", widths=(0.25, 1.0))
    records = play(setup, method)
    records.append(ClientRecord(0, (fq.Subnet(),)))  # without a valid answer
    kinds = set()
    for score in compute_client_scores(setup, records):
        own = [r.returned[0] for r in records if r.client == score.client and r.is_valid]
        sent = [4 * params(setup.structure.kept_count(subnet, "0")) for subnet in own]
        assert (score.rounds, score.bytes_per_round) == (len(own), sum(sent) / len(own))
        kinds.add(len(set(sent)))
    assert 2 in kinds  # some client trained both widths


def test_clients_that_choose_send_their_choice_and_receive_the_whole(setup):
    own = {0: fq.Subnet.from_channels({"0": [1, 6]}), 2: fq.Subnet.from_channels({"0": [0, 2, 5]})}
    scores = compute_client_scores(setup, play(setup, fq.ADDS(fraction=1.0), own))
    assert [s.params_per_round for s in scores] == [params(n) for n in (2, 8, 3, 8)]
    assert [s.bytes_per_round for s in scores] == [4 * params(n) for n in (2, 8, 3, 8)]
    assert [s.params_received for s in scores] == [params(8)] * 4
    assert [s.macs for s in scores] == [5 * 8] * 4  # it is the whole net that they train


def test_before_they_chose_clients_sent_what_they_trained(setup):
    method = fq.APFL(fraction=1.0, warm_up=0.5)  # by those that can afford the whole: 2 and 3
    own = {i: fq.Subnet.from_channels({"0": range(i + 1)}) for i in range(4)}
    scores = compute_client_scores(setup, play(setup, method, own))
    searched = params(8)  # one round, in which the whole net is received
    assert [s.rounds for s in scores] == [7, 7, 10, 10]
    for score, warm_up in zip(scores, (0, 0, 3, 3), strict=True):
        trained = 6 * params(score.client + 1) + warm_up * params(8)
        assert score.params_received * score.rounds == pytest.approx(trained + searched)


def test_labels_are_compared_with_all_classes_alike(setup):
    def held(*labels: int):
        return to_examples((torch.zeros(len(labels), 3), torch.tensor(labels)))

    found = compute_label_divergences(setup, {4: held(0, 1, 1, 0), 1: held(1, 1, 1)})
    one_of_two = (
        math.log2(1 / 0.75) + 0.5 * math.log2(0.5 / 0.25) + 0.5 * math.log2(0.5 / 0.75)
    ) / 2
    assert found == {4: 0.0, 1: pytest.approx(one_of_two)}
