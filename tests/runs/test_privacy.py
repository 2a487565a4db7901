"""Private runs: what they write, that they end in time, and that they can be resumed."""

from __future__ import annotations

import json
import stat
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.errors import CheckpointError, ConfigError
from fedquilt.federation.privacy.settings import hide_data
from fedquilt.federation.registry import ClientRegistry
from fedquilt.federation.state import Setup
from fedquilt.runs.plan import RunPlan, start_run
from fedquilt.runs.policies import Cadence, FaultPolicy
from fedquilt.runs.privacy import PrivateRounds
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import build_method, build_privacy, choose_config_sampling

BUDGETS = (1.0, 0.5)
PRIVACY = fq.Privacy(epsilon=8.0, accountant="rdp")  # which is quicker


@pytest.fixture(scope="module")
def population():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(120, 6, generator=generator)
    data = (inputs, inputs[:, :3].argmax(1))
    return fq.make_clients(data, test=data, count=20, budgets=BUDGETS)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def train(population, out=None, **options):
    options = {"rounds": 4, "workers": 0, "privacy": PRIVACY, **options}
    method = options.pop("method", None) or fq.HeteroFL(fq.LocalTraining(epochs=1), fraction=0.4)
    return fq.train(make_model(), torch.zeros(1, 6), method, population, out=out, **options)


def read_rounds(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "phase" in record]


def test_records_tell_what_was_spent_and_nothing_of_single_clients(population, tmp_path):
    train(population, tmp_path / "run")
    rounds = read_rounds(tmp_path / "run")
    spent = [record["privacy"]["epsilon"] for record in rounds]
    assert spent == sorted(spent)
    assert 0 < spent[0] < spent[-1] <= 8.0
    for record in rounds:
        assert record["clients"]["id"] == record["failures"] == []
        assert record["loss"] is None
        assert record["scales"] == {}
        assert record["num_clients"] == 8  # as expected, not as it was
    assert len({(record["bytes_up"], record["bytes_down"]) for record in rounds}) == 1


def test_the_secret_is_readable_by_its_owner_alone_and_in_no_other_file(population, tmp_path):
    train(population, tmp_path / "run")
    secret = tmp_path / "run" / "secret.key"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    key = secret.read_text().strip()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path != secret:
            content = path.read_bytes()
            assert key.encode() not in content
            assert bytes.fromhex(key) not in content


def test_runs_of_one_seed_differ_and_a_resumed_run_releases_the_same_numbers(population, tmp_path):
    class Stop(KeyboardInterrupt):
        pass

    def stop(event):
        if isinstance(event, fq.RoundDone) and event.round == 3:
            raise Stop

    cadence = Cadence(checkpoint_every=2)
    whole = train(population, tmp_path / "whole", cadence=cadence)
    other = train(population)
    assert not torch.equal(whole.state.params["0.weight"], other.state.params["0.weight"])
    with pytest.raises(Stop):
        train(population, tmp_path / "cut", cadence=cadence, callbacks=[stop])
    (tmp_path / "cut" / "secret.key").write_text((tmp_path / "whole" / "secret.key").read_text())
    for folder in (tmp_path / "cut" / "checkpoints").iterdir():  # from its first round again
        (folder / "state.json").unlink()
        (folder / "params.safetensors").unlink()
        folder.rmdir()
    resumed = train(population, tmp_path / "cut", cadence=cadence, resume=True)
    for name, tensor in whole.state.params.items():
        assert torch.equal(tensor, resumed.state.params[name])
    assert read_rounds(tmp_path / "whole") == read_rounds(tmp_path / "cut")


def test_without_its_secret_a_run_is_not_resumed(population, tmp_path):
    train(population, tmp_path / "run")
    (tmp_path / "run" / "secret.key").unlink()
    with pytest.raises(CheckpointError, match="a second time; put the file back"):
        train(population, tmp_path / "run", rounds=5, resume=True)


@pytest.mark.parametrize("mechanism", ["central", "local"])
def test_any_number_of_workers_gives_the_same_bits(population, tmp_path, monkeypatch, mechanism):
    monkeypatch.setattr("fedquilt.runs.plan.make_secret", lambda: b"k" * 32)
    privacy = fq.Privacy(noise_multiplier=0.3, mechanism=mechanism)
    runs = [train(population, privacy=privacy, rounds=2, workers=count) for count in (0, 2)]
    for name, tensor in runs[0].state.params.items():
        assert torch.equal(tensor, runs[1].state.params[name])


@pytest.mark.parametrize(("mechanism", "budget"), [("central", 6.0), ("local", 30.0)])
def test_a_run_stops_before_its_budget_is_exceeded(population, tmp_path, mechanism, budget):
    privacy = fq.Privacy(budget, noise_multiplier=0.8, mechanism=mechanism, accountant="rdp")
    train(population, tmp_path / "run", rounds=20, privacy=privacy)
    rounds = read_rounds(tmp_path / "run")
    assert 1 <= len(rounds) < 20
    assert rounds[-1]["privacy"]["epsilon"] <= budget
    unlimited = replace(privacy, epsilon=None)
    clients = tuple(map(hide_data, population.clients))
    model = make_model()
    setup = Setup(
        model,
        fq.trace_structure(model, torch.zeros(1, 6)),
        torch.zeros(1, 6),
        clients,
        40,
        0,
        "poisson",
    )
    if mechanism == "central":
        method = fq.HeteroFL(fraction=0.4).make_private()
        after = PrivateRounds(unlimited, setup, method, b"k" * 32)
        state = after.start(method.start(setup))
        assert after.compute_epsilon(state, len(rounds) + 1) > budget


def test_noise_is_kept_when_a_run_gets_more_rounds(population, tmp_path):
    train(population, tmp_path / "run")
    noise = read_rounds(tmp_path / "run")[0]["privacy"]["noise_multiplier"]
    train(population, tmp_path / "run", rounds=9, resume=True)
    rounds = read_rounds(tmp_path / "run")
    assert {record["privacy"]["noise_multiplier"] for record in rounds} == {noise}
    assert rounds[-1]["privacy"]["epsilon"] <= 8.0  # so it has no more rounds than before


def test_per_ring_clipping_costs_small_clients_less(population, tmp_path):
    train(population, tmp_path / "run", privacy=replace(PRIVACY, clipping="rings"))
    spent = read_rounds(tmp_path / "run")[-1]["privacy"]
    small, large = (spent["tier_epsilon"][size] for size in sorted(spent["tier_epsilon"], key=int))
    assert large == pytest.approx(spent["epsilon"])
    assert small < 0.9 * large


def test_adaptive_clipping_moves_the_norm_in_the_records(population, tmp_path):
    privacy = fq.Privacy(noise_multiplier=0.3, clipping="adaptive", clip=100.0)
    train(population, tmp_path / "run", privacy=privacy)
    norms = [record["privacy"]["clip"] for record in read_rounds(tmp_path / "run")]
    assert norms == sorted(norms, reverse=True)
    assert norms[-1] < norms[0] == 100.0


@pytest.mark.parametrize("aggregator", [None, fq.FullMean()])
def test_without_noise_and_with_all_clients_a_private_mean_is_the_mean(population, aggregator):
    privacy = fq.Privacy(noise_multiplier=0.0, clip=1e6)
    local_training = fq.LocalTraining(epochs=1)
    method = fq.HeteroFL(local_training, fraction=1.0, own_rows=False, aggregator=aggregator)
    private = train(population, privacy=privacy, method=method, rounds=1)
    plain = train(population, privacy=None, method=method, rounds=1)
    for name, tensor in plain.state.params.items():
        torch.testing.assert_close(private.state.params[name], tensor)


def test_clients_with_few_examples_can_count_less(population):
    privacy = fq.Privacy(noise_multiplier=0.0, clip=1e6, max_examples=12)  # each has 6
    method = fq.FedAvg(fq.LocalTraining(epochs=1), fraction=1.0)
    half = train(population, privacy=privacy, method=method, rounds=1)
    whole = train(population, privacy=replace(privacy, max_examples=None), method=method, rounds=1)
    old = make_model().state_dict()
    for name, tensor in whole.state.params.items():
        torch.testing.assert_close(half.state.params[name] - old[name], (tensor - old[name]) / 2)


def test_a_cohort_of_poisson_sampling_needs_no_privacy(population):
    seen = []
    run = train(
        population,
        privacy=None,
        sampling="poisson",
        rounds=6,
        callbacks=[lambda e: seen.append(e.num_clients) if isinstance(e, fq.RoundDone) else None],
    )
    assert len(set(seen)) > 1
    assert run.scores[0].accuracy is not None


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"cadence": Cadence(test_locally=True)}, "leave out run.test_locally"),
        ({"faults": FaultPolicy(oversample=0.5)}, "leave out flower.oversample"),
        ({"method": fq.ADDS()}, "ADDS cannot be private: clients choose their channels"),
        ({"method": fq.APFL()}, "APFL cannot be private: clients search"),
        ({"method": fq.standalone()}, "on its clients|nothing to make private"),
    ],
)
def test_what_would_tell_of_clients_data_is_refused(population, options, rule):
    with pytest.raises(ConfigError, match=rule):
        train(population, **options)


def test_a_private_run_is_not_resumed_as_another(population, tmp_path):
    train(population, tmp_path / "run")
    with pytest.raises(CheckpointError):
        train(population, tmp_path / "run", rounds=6, resume=True, privacy=None)


def test_settings_turn_privacy_on_and_with_it_poisson_sampling():
    config = load_config(override_settings({}, {"privacy.epsilon": 4.0}))
    assert build_privacy(config) == fq.Privacy(epsilon=4.0)
    assert choose_config_sampling(config) == "poisson"
    assert build_method(config).own_rows is False
    plain = load_config({})
    assert build_privacy(plain) is None
    assert choose_config_sampling(plain) == "fixed"


def test_the_server_is_not_told_labels_nor_numbers_of_examples(population):
    model = make_model()
    setup = Setup(
        model,
        fq.trace_structure(model, torch.zeros(1, 6)),
        torch.zeros(1, 6),
        population.clients,
        1,
        0,
        "poisson",
    )
    plan = RunPlan(setup, fq.HeteroFL(), population, privacy=fq.Privacy(epsilon=1.0))
    prepared = start_run(plan)
    assert {(c.num_examples, c.labels, c.group) for c in prepared.setup.clients} == {(1, (), "")}
    assert [c.budget for c in prepared.setup.clients] == [c.budget for c in population.clients]


def test_a_private_round_makes_none_of_the_registered_clients_but_the_drawn_ones(monkeypatch):
    made = []
    get = ClientRegistry._get
    monkeypatch.setattr(
        ClientRegistry, "_get", lambda self, row: made.append(row) or get(self, row)
    )
    people = fq.make_clients(print, count=1_000_000, num_examples=20, labels=(0,), budgets=BUDGETS)
    model, example = make_model(), torch.zeros(1, 6)
    registry = people.clients.without_data()
    structure = fq.trace_structure(model, example)
    setup = Setup(model, structure, example, registry, 3, 0, sampling="poisson")
    method = fq.HeteroFL(fraction=2e-5).make_private()
    rounds = PrivateRounds(fq.Privacy(noise_multiplier=1.0), setup, method, b"k" * 32)
    state = rounds.start(method.start(setup))
    tasks = list(rounds.plan(state, None))
    assert 5 < len(tasks) < 50
    assert sum(rounds.count_holdings(setup, state).values()) == len(registry)
    assert len(made) < 3 * len(tasks) + 20
