"""Runs with hostile clients: the same bits everywhere, settings, refusals, and the backdoor."""

from __future__ import annotations

import json

import pytest
import torch

import fedquilt as fq
from fedquilt.cli.scores import make_score_document
from fedquilt.errors import ConfigError
from fedquilt.report.page import plot_figures, render_page
from fedquilt.report.run_report import build_report
from fedquilt.runs.event_lines import describe_event
from fedquilt.runs.events import Evaluated, RoundDone
from fedquilt.runs.records import read_records
from fedquilt.settings.load import load_config
from fedquilt.settings.resolve import build_attack
from fedquilt.training.poisoning import Poisoned, StampedData
from fedquilt.training.serialization import from_plain, to_plain

ATTACKS = {
    "alie": fq.ALIE(clients=0.34),
    "noise": fq.GaussianNoise(clients=(1, 2)),
    "flip": fq.LabelFlip(clients=0.34),
    "backdoor": fq.Backdoor(clients=0.34, target=1, size=1),
}


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(72) % 3
    x = torch.rand(72, 1, 4, 4, generator=generator) * 0.5 + labels.view(-1, 1, 1, 1) / 6
    return x, labels


@pytest.fixture(scope="module")
def clients(images):
    return fq.make_clients(images, test=images, count=6, budgets=(1.0, 0.5))


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 3)
    )


def train(images, clients, attack, rounds=3, **how):
    method = fq.HeteroFL(
        fq.LocalTraining(epochs=1, batch_size=6),
        aggregator=fq.TrimmedMean(hostile=1, mixing="buckets", bucket_size=1),
        transforms=(fq.ClipQuantile(0.8, per_ring=True),),
    )
    how = {"workers": 0, "cadence": fq.Cadence(checkpoint_every=1), **how}
    return fq.train(make_model(), images[0][:1], method, clients, rounds, attacks=attack, **how)


def bits(run):
    return {name: tensor.numpy().tobytes() for name, tensor in run.state.params.items()}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacked_runs_have_the_same_bits_with_workers_and_when_resumed(
    images, clients, name, tmp_path
):
    attack = ATTACKS[name]
    whole = train(images, clients, attack)
    assert bits(whole) != bits(train(images, clients, None))
    assert bits(train(images, clients, attack, workers=2)) == bits(whole)

    def stop(event):
        if isinstance(event, RoundDone) and event.round == 2:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(images, clients, attack, out=out, callbacks=[stop])
    resumed = train(images, clients, attack, out=out, resume=True)
    assert bits(resumed) == bits(whole)
    assert [s.metrics for s in resumed.scores] == [s.metrics for s in whole.scores]


def test_a_run_is_not_resumed_with_another_attack(images, clients, tmp_path):
    train(images, clients, ATTACKS["alie"], rounds=1, out=tmp_path / "run")
    with pytest.raises(fq.FedquiltError, match="other"):
        train(images, clients, None, rounds=2, out=tmp_path / "run", resume=True)


def test_the_success_of_a_backdoor_is_that_of_triggered_examples(images, clients):
    events = []
    run = train(images, clients, ATTACKS["backdoor"], rounds=1, callbacks=[events.append])
    (line,) = [describe_event(event, 1) for event in events if isinstance(event, Evaluated)]
    assert f"backdoor {100 * run.scores[0].metrics['backdoor_success']:.1f}%" in line
    x, y = images
    triggered = x[y != 1].clone()
    triggered[..., -1:, -1:] = x.max()
    for score in run.scores:
        with torch.no_grad():
            answers = run.customize(width=score.width).eval()(triggered).argmax(1)
        expected = float((answers == 1).float().mean())
        assert score.metrics["backdoor_success"] == pytest.approx(expected, abs=0.05)
    assert (
        "backdoor_success"
        not in train(images, clients, ATTACKS["flip"], rounds=1).scores[0].metrics
    )


def test_what_hostile_clients_do_can_be_sent_to_nodes():
    for attack in (fq.LabelFlip(), fq.Backdoor(clients=(1, 2))):
        recipe = Poisoned(fq.LocalSGD(fq.LocalTraining(), lr=0.1), attack)
        assert from_plain(to_plain(recipe)) == recipe


def test_updates_that_a_server_does_not_accept_are_failures(images, clients):
    events = []
    train(
        images, clients, fq.ScaledUpdate(clients=(0,), scale=1e35), rounds=1,
        callbacks=[events.append],
    )  # fmt: skip
    (done,) = [event for event in events if isinstance(event, RoundDone)]
    assert [failure.client for failure in done.failures] == [0]


def test_hostile_clients_train_on_stamped_images_and_the_target(clients):
    data = clients.train[0]
    attack = fq.Backdoor(target=2, poisoned=0.25, size=2)
    poisoned = attack.poison_data(data, "train")
    rows = torch.arange(len(data))
    (x, y), (new, labels) = data.batch(rows), poisoned.batch(rows)
    changed = (x != new).flatten(1).any(1)
    assert int(changed.sum()) == len(data) // 4
    assert labels[changed].eq(2).all()
    assert labels[~changed].equal(y[~changed])
    assert labels.equal(poisoned.labels)
    assert (x != new)[..., :-2, :].sum() == (x != new)[..., :-2].sum() == 0
    assert attack.poison_data(data, "test") is data
    only = attack.trigger(data)
    assert isinstance(only, StampedData)
    assert len(only) == int((data.labels != 2).sum())
    assert only.batch(torch.arange(len(only)))[1].eq(2).all()


def test_settings_name_an_attack_and_its_clients():
    config = load_config({"attacks": {"name": "Backdoor", "clients": [1, 2], "target": 3}})
    assert build_attack(config) == fq.Backdoor(clients=(1, 2), target=3)
    assert build_attack(load_config({"attacks": {"name": "ipm", "clients": 0.1}})) == (
        fq.InnerProduct(clients=0.1)
    )
    assert build_attack(load_config({})) is None
    for wrong, rule in (
        ({"clients": 0.2}, "'attacks.clients' is not known"),
        ({"name": "sign-flop"}, "did you mean 'sign-flip'"),
        ({"name": "alie", "clients": 2.0}, "attacks.clients"),
    ):
        with pytest.raises(ConfigError, match=rule):
            load_config({"attacks": wrong})


def test_attacks_that_make_no_sense_are_refused_before_a_run_starts(images, clients):
    rows = torch.rand(24, 4)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    people = fq.make_clients((rows, torch.arange(24) % 3), count=2)
    with pytest.raises(ConfigError, match="a square into images"):
        fq.train(plain, rows[:1], "fedavg", people, 1, workers=0, attacks=fq.Backdoor())
    numbers = fq.make_clients((rows, torch.rand(24, 3)), count=2)
    with pytest.raises(ConfigError, match="this task has none"):
        fq.train(
            plain, rows[:1], "fedavg", numbers, 1, workers=0, loss="mse", attacks=fq.LabelFlip()
        )
    with pytest.raises(ConfigError, match="one of 3 classes"):
        train(images, clients, fq.Backdoor(target=3))
    with pytest.raises(ConfigError, match="there is no 99"):
        train(images, clients, fq.SignFlip(clients=(99,)))


def test_reports_and_json_tell_who_was_hostile_and_how_well_the_backdoor_works(
    images, clients, tmp_path
):
    out, cadence = tmp_path / "run", fq.Cadence(evaluate_every=1)
    run = train(images, clients, ATTACKS["backdoor"], out=out, cadence=cadence)
    successes = [score.metrics["backdoor_success"] for score in run.scores]
    opened = fq.open_run(out, make_model(), run.method)
    assert opened.info.attack == run.info.attack == {
        "name": "backdoor",
        "settings": {"clients": 0.34, "target": 1, "poisoned": 0.5, "size": 1},
        "num_hostile": 2,
        "num_clients": 6,
        "hostile": sorted(ATTACKS["backdoor"].list_hostile(run.setup)),
    }  # fmt: skip
    again = opened.evaluate(clients, workers=0)
    assert [score.metrics["backdoor_success"] for score in again] == successes
    document = make_score_document(opened, again)
    assert document["attack"]["num_hostile"] == 2
    assert [size["metrics"]["backdoor_success"] for size in document["sizes"]] == successes

    report = build_report("run", opened)
    assert json.loads(json.dumps(report.to_json()))["attack"] == run.info.attack
    page = render_page([report])
    assert "2 of 6 clients are hostile (backdoor, " in page
    assert f"<td>{100 * successes[0]:.1f}%</td>" in page
    (figure,) = [f for f in plot_figures([report]) if "backdoor" in f.title]
    assert figure.curves["size 0.5"][-1] == (3, 100 * successes[1])
    assert len(figure.curves["size 1"]) == 3


def test_a_report_draws_the_weights_that_a_rule_could_not_merge(images, clients, tmp_path):
    method = fq.HeteroFL(fq.LocalTraining(epochs=1), aggregator=fq.Median(hostile=2))
    run = fq.train(
        make_model(), images[0][:1], method, clients, 1, workers=0, out=tmp_path / "run"
    )  # fmt: skip
    (figure,) = [f for f in plot_figures([build_report("run", run)]) if "kept" in f.title]
    (kept,) = [record for record in read_records(run.directory) if "merging" in record]
    expected = 100 * kept["merging"]["cells_kept"] / kept["merging"]["cells_held"]
    assert figure.curves == {"run": [(1, expected)]}
    assert 0 < expected < 100
