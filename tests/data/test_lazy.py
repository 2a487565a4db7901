"""Clients whose data are made when they are asked for."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.data import to_examples
from fedquilt.data.partition import by_class
from fedquilt.errors import DataError, TrainingError
from fedquilt.federation.client import Client
from fedquilt.federation.columns import CodedColumn, LabelColumn, RaggedColumn
from fedquilt.federation.registry import MANY_CLIENTS, ClientRegistry
from fedquilt.federation.state import Phase, sample_cohort
from fedquilt.structure.budget import Budget

MANY = MANY_CLIENTS + 5


def load(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(client)
    return torch.rand(6, 4, generator=generator), torch.arange(6) % 3


def train(clients: fq.Population, out=None) -> fq.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    settings = fq.LocalTraining(lr=0.1, epochs=1, batch_size=4)
    method = fq.HeteroFL(settings, fraction=3 / len(clients))
    return fq.train(model, torch.zeros(1, 4), method, clients, rounds=2, workers=0, out=out)


def test_a_function_of_a_client_gives_the_run_of_the_list_that_it_makes():
    lists = [load(client) for client in range(12)]
    one = train(fq.make_clients(lists, budgets=(1.0, 0.5), validation=0.2, test_fraction=0.2))
    made = fq.make_clients(
        load, count=12, num_examples=6, budgets=(1.0, 0.5), validation=0.2, test_fraction=0.2
    )
    other = train(made)
    assert all(torch.equal(one.state.params[name], t) for name, t in other.state.params.items())
    assert one.scores == other.scores


def test_a_run_makes_the_data_of_the_clients_that_it_asks_and_of_no_others(tmp_path):
    asked = Counter()

    def note(client):
        asked[client] += 1
        return load(client)

    clients = fq.make_clients(note, count=MANY, num_examples=6, labels=(0, 1, 2))
    run = train(clients, tmp_path / "run")
    took_part = {record.client for part in run.read_clients() for record in part}
    assert len(took_part) <= 6
    assert set(asked) <= took_part | {0}  # the first one is looked at before the run
    assert train(clients).state.params["0.weight"].equal(run.state.params["0.weight"])


def test_among_very_many_clients_everyone_is_as_likely_to_be_drawn_and_nobody_twice():
    clients = fq.make_clients(load, count=MANY, num_examples=6, labels=(0,)).clients
    phase, counts = Phase("train", 1, 40 / MANY), Counter()
    for seed in range(50):
        cohort = [client.id for client in sample_cohort(clients, phase, seed)]
        assert len(set(cohort)) == 40
        assert cohort == sorted(cohort)
        counts.update(client * 10 // MANY for client in cohort)
    expected = 50 * 40 / 10
    assert max(abs(counts[tenth] - expected) for tenth in range(10)) < 5 * expected**0.5
    sizes = [len(sample_cohort(clients, phase, s, sampling="poisson")) for s in range(200)]
    assert abs(np.mean(sizes) - 40) < 5 * (40 / 200) ** 0.5
    assert np.var(sizes) > 20  # of a Poisson draw: about 40
    available = {5, 77, MANY - 1, MANY + 9}
    asked = sample_cohort(clients, phase, 3, available=available)
    assert [client.id for client in asked] == [5, 77, MANY - 1]


def test_rows_labels_and_groups_of_a_division_are_those_of_each_client():
    labels = torch.randint(5, (60,), generator=torch.Generator().manual_seed(0))
    groups = np.arange(60) // 15
    inputs = torch.rand(60, 4)
    people = fq.make_clients((inputs, labels), partition="domain", count=8, groups=(groups, None))
    for client in people.clients:
        data = people.train[client.id]
        assert client.labels == data.label_set
        assert client.num_examples == len(data)
        assert client.group == str(client.id // 2)
    divided = torch.cat([people.train[i].inputs for i in range(8)])
    assert sorted(divided[:, 0].tolist()) == sorted(inputs[:, 0].tolist())


def raise_one_by_one(counts, minimum):
    """The rule as it is said: the poorest gets from the richest, until nobody is poor."""
    counts = counts.copy()
    totals = counts.sum(axis=0)
    while totals.min() < minimum:
        poor, rich = int(totals.argmin()), int(totals.argmax())
        label = int(counts[:, rich].argmax())
        given = min(minimum - totals[poor], counts[label, rich])
        counts[label, [poor, rich]] += (given, -given)
        totals[[poor, rich]] += (given, -given)
    return counts


@pytest.mark.parametrize("minimum", [1, 2, 5])
def test_heaps_raise_clients_to_the_minimum_as_looking_at_all_of_them_does(minimum):
    for seed in range(20):
        counts = np.random.default_rng(seed).negative_binomial(1, 0.1, size=(3, 30))
        if counts.sum() >= 30 * minimum:
            found = by_class._raise_to_minimum(counts, minimum)
            assert np.array_equal(found, raise_one_by_one(counts, minimum))


def test_budgets_of_an_array_are_those_of_its_list():
    widths = np.array([1.0, 0.5, 0.25, 0.5])
    people = [
        fq.make_clients(load, count=4, num_examples=6, labels=(0,), budgets=given)
        for given in (widths, widths.tolist())
    ]
    assert [c.budget for c in people[0].clients] == [c.budget for c in people[1].clients]


def test_a_method_looks_once_at_each_budget_whatever_the_number_of_clients(monkeypatch):
    from fedquilt.methods import affordability

    calls = []
    real = affordability.fit_budget
    monkeypatch.setattr(
        affordability, "fit_budget", lambda *a, **k: calls.append(a) or real(*a, **k)
    )
    clients = ClientRegistry.of([Client(i, 5, budget=Budget(1 / (1 + i % 3))) for i in range(300)])
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    structure = fq.trace_structure(model, torch.zeros(1, 4))
    setup = fq.Setup(model, structure, torch.zeros(1, 4), clients, rounds=1, seed=0)
    method = fq.HeteroFL()
    sizes = [method.sizes(setup) for _ in range(5)]
    assert sizes[0] == (1.0, 0.5, 1 / 3)
    assert len(calls) == 3
    assert all(a >= b for a, b in pairwise(sizes[0]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "give their number"),
        ({"count": 5, "num_examples": 0}, "num_examples is a whole number"),
        ({"count": 5, "num_examples": [1, 2]}, "array of 5"),
        ({"count": 5, "labels": [(0,), (1,)]}, "2 for 5 clients"),
        ({"count": 5, "labels": 3}, r"labels=range\(10\), got 3"),
        ({"count": 5, "labels": {0, 1}}, r"labels=range\(10\), got {0, 1}"),
        ({"count": 5, "validation": 0.2}, "give num_examples"),
        ({"count": 5, "holdout_clients": 0.2}, "holdout_clients"),
    ],
)
def test_a_function_without_what_is_needed_is_an_error_that_says_so(settings, words):
    with pytest.raises(DataError, match=words):
        fq.make_clients(load, **settings)


def test_numbers_of_data_that_are_there_are_not_asked_for():
    with pytest.raises(DataError, match="leave them out"):
        fq.make_clients(load(0), count=2, num_examples=3)


def test_a_function_that_returns_nothing_fails_its_client_and_names_it():
    clients = fq.make_clients(lambda client: (torch.zeros(0, 4), torch.zeros(0).long()), count=3)
    with pytest.raises(DataError, match="client 0 has no data"):
        clients.train[0]


def test_a_function_that_raises_names_the_client_whose_data_it_was():
    clients = fq.make_clients(lambda client: load(client // (client - 2)), count=4)
    assert [clients.clients[client].num_examples for client in (0, 1, 3)] == [6, 6, 6]
    with pytest.raises(DataError, match="client 2 could not be made: ZeroDivisionError"):
        clients.clients[2].num_examples  # noqa: B018


class Own(torch.utils.data.Dataset):
    """A client's data as a dataset."""

    def __init__(self, client: int) -> None:
        self.inputs, self.labels = load(client)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[row], self.labels[row]


def test_a_class_of_datasets_makes_the_data_of_clients():
    ours, theirs = (train(fq.make_clients(make, count=5)) for make in (Own, load))
    assert all(torch.equal(ours.state.params[name], t) for name, t in theirs.state.params.items())


def test_other_sizes_than_were_said_fail_the_client_and_the_reason_names_the_setting():
    clients = fq.make_clients(load, count=3, num_examples=3, labels=(0, 1, 2))
    with pytest.raises(TrainingError, match="num_examples is what it makes"):
        train(clients)


@pytest.mark.parametrize("name", ["pfedme", "feduniform"])
def test_what_is_stored_with_a_finished_model_does_not_grow_with_the_clients(name):
    lengths = []
    for count in (10, 1000):
        clients = fq.make_clients(load, count=count, num_examples=6, labels=(0, 1, 2))
        settings = fq.LocalTraining(epochs=1, batch_size=4)
        method = fq.METHODS[name](settings, fraction=2 / count, query_fraction=2 / count)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        run = fq.train(model, torch.zeros(1, 4), method, clients, rounds=1, workers=0)
        lengths.append(len(json.dumps(run.info.to_json())))
        assert run.info.decode_subnets()[count - 1].encode() == (
            run.state.chosen_subnets[count - 1].encode()
        )
    assert lengths[1] < lengths[0] + 200


def test_a_mapped_file_is_not_copied_and_gives_the_run_of_its_array(tmp_path):
    generator = np.random.default_rng(0)
    array = generator.random((60, 4), dtype=np.float32)
    labels = generator.integers(0, 3, 60)
    np.save(tmp_path / "x.npy", array)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    examples = to_examples((mapped, labels))
    assert examples.inputs.data_ptr() == mapped.ctypes.data
    runs = [train(fq.make_clients((x, labels), count=6)) for x in (array, mapped)]
    assert runs[0].state.params["0.weight"].equal(runs[1].state.params["0.weight"])
    broken = array.copy()
    broken[7, 1] = np.nan
    with pytest.raises(DataError, match="1 NaN or infinite of 240"):
        to_examples((broken, labels))


@pytest.mark.parametrize("kind", ["hugging face", "arrow"])
def test_tables_give_the_run_of_their_arrays(kind):
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    generator = np.random.default_rng(0)
    array = generator.random((60, 4), dtype=np.float32)
    labels = generator.integers(0, 3, 60)
    columns = {"x": list(array), "label": labels}
    table = datasets.Dataset.from_dict(columns) if kind == "hugging face" else None
    table = pyarrow.table(columns) if table is None else table
    divided = fq.make_clients(table, partition="classes:2", count=6)
    expected = fq.make_clients((array, labels), partition="classes:2", count=6)
    assert [c.labels for c in divided.clients] == [c.labels for c in expected.clients]
    for client in range(6):
        rows = torch.arange(len(divided.train[client]))
        batch, other = (people.train[client].batch(rows) for people in (divided, expected))
        assert batch[0]["x"].equal(other[0])
        assert batch[1].equal(other[1])
    with pytest.raises(DataError, match="pass one of them"):
        fq.make_clients(datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)}))


def test_the_query_for_statistics_asks_as_many_clients_as_wanted():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    structure = fq.trace_structure(model, torch.zeros(2, 4))
    clients = fq.make_clients(load, count=MANY, num_examples=6, labels=(0, 1, 2)).clients
    setup = fq.Setup(model, structure, torch.zeros(2, 4), clients, rounds=1, seed=0)
    for fraction, count in ((None, 100), (20 / MANY, 20)):
        method = fq.HeteroFL(query_fraction=fraction)
        (phase,) = method.closing_phases(setup)
        cohort = sample_cohort(clients, phase, seed=0)
        assert len(method.plan(setup, fq.State(0, phase.name, {}), cohort)) == count


def make_registry(sizes, labels, budgets, kind=np.int64):
    rows = [np.array(row, kind) for row in labels]
    nothing = CodedColumn.repeat(None, len(rows))
    return ClientRegistry(
        range(len(rows)),
        np.array(sizes, kind),
        LabelColumn(RaggedColumn.of(rows)),
        CodedColumn((Budget(1.0), Budget(0.5)), np.array(budgets, kind)),
        CodedColumn.repeat("", len(rows)),
        nothing,
    )


def test_every_number_of_the_columns_is_part_of_a_registrys_hash():
    base = make_registry([1, 2, 3], [[0], [1, 2], []], [0, 1, 0])
    others = [
        make_registry([257, 2, 3], [[0], [1, 2], []], [0, 1, 0]),
        make_registry([-255, 2, 3], [[0], [1, 2], []], [0, 1, 0]),
        make_registry([1, 2, 3], [[0, 1], [2], []], [0, 1, 0]),
        make_registry([1, 2, 3], [[0], [1, 258], []], [0, 1, 0]),
        make_registry([1, 2, 3], [[0], [1, 2], []], [0, 0, 1]),
    ]
    hashes = {registry.hash_columns() for registry in (base, *others)}
    assert len(hashes) == 1 + len(others)
    small = make_registry([1, 2, 3], [[0], [1, 2], []], [0, 1, 0], np.int16)
    assert small.hash_columns() == base.hash_columns()
