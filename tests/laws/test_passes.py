"""Laws of clients in one pass, for every method whose clients train in the plain way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.laws.conftest import METHODS, Case, Net, population
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.federation.state import Setup
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.event_lines import describe_event
from fedquilt.runs.events import PassSizeChosen
from fedquilt.training.stack import trial

PLAIN = (
    *("fedavg", "fedavg-at", "feddrop", "feddrop each", "fedrolex", "heterofl", "heterofl dynamic"),
    *("lg-fedavg", "nefl", "nefl by depth", "splitmix"),
    *("sheterofl", "sheterofl tracked", "standalone"),
)
OTHERS = ("fedavg-oat", "fjord")


def run_round(name: str, setup: Setup, workers: int, clients_per_pass: int):
    """The tensors after a round, the mean loss, and how many clients were in a pass at most."""
    method = METHODS[name]
    if hasattr(method, "fraction"):
        method = replace(method, fraction=1.0)
    case = Case(method, setup, method.prepare_model(setup), population())
    with case.engine(workers, clients_per_pass=clients_per_pass) as engine:
        state, record = case.first_round(engine)
    sizes = [size.clients for size in engine.pass_sizes.chosen.values()]
    return state.params, record.loss, max(sizes, default=1)


@pytest.mark.parametrize("name", PLAIN)
def test_clients_in_one_pass_train_the_same_model_but_for_rounding(name, setup):
    alone, loss, _ = run_round(name, setup, 0, 1)
    stacked, stacked_loss, most = run_round(name, setup, 0, 4)
    assert most == 4
    assert stacked_loss == pytest.approx(loss, rel=1e-4)
    torch.testing.assert_close(stacked, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["heterofl", "splitmix"])
def test_passes_have_the_same_bits_on_any_number_of_workers(name, setup):
    runs = [run_round(name, setup, workers, 4) for workers in (0, 1, 2)]
    assert len({str(Case.bits(params)) for params, *_ in runs}) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_clients_that_work_in_another_way_keep_their_bits(name, setup):
    alone, stacked = (run_round(name, setup, 0, count) for count in (1, 4))
    assert Case.bits(alone[0]) == Case.bits(stacked[0])


def test_a_run_that_goes_on_has_the_choices_that_it_was_started_with(tmp_path, monkeypatch):
    """Afterwards a trial would say something else."""

    def choose(count):
        found = trial.Trial(count, {1: 0.002, count: 0.001})
        monkeypatch.setattr("fedquilt.training.stack.clients.try_counts", lambda *_, **__: found)

    method = fq.HeteroFL(fq.LocalTraining(batch_size=4), fraction=1.0)

    def make_model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 4))

    def train(folder, rounds, **more):
        example = torch.zeros(1, 1, 6, 6)
        options = {"workers": 0, "clients_per_pass": "auto", "out": tmp_path / folder, **more}
        return fq.train(make_model(), example, method, population(), rounds, **options)

    events = []
    choose(8)
    whole = train("whole", 2, callbacks=[events.append])
    train("parts", 1)
    before = RunDirectory(tmp_path / "parts").passes_file.read_bytes()
    choose(1)
    parts = train("parts", 2, resume=True)
    assert RunDirectory(tmp_path / "parts").passes_file.read_bytes() == before
    assert Case.bits(whole.state.params) == Case.bits(parts.state.params)
    chosen = [event for event in events if isinstance(event, PassSizeChosen)]
    assert len(chosen) == 2  # of widths 1/2 and 1/4; one client alone has width 1
    assert "train 8 in one pass: milliseconds a step: 2 with 1" in describe_event(chosen[0], 2)


def test_an_engine_of_ones_own_takes_no_number_of_clients():
    with pytest.raises(ConfigError, match=r"engine of your own .* clients_per_pass=4"):
        fq.train(
            Net(),
            torch.zeros(1, 1, 6, 6),
            "fedavg",
            population(),
            1,
            engine=lambda *_: None,
            clients_per_pass=4,
        )
