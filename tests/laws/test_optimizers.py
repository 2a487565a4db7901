"""The laws hold for every method with Adam, its state kept, and steps over several batches."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import fedquilt as fq
from fedquilt.engines.client_state import read_client_state
from fedquilt.errors import ConfigError
from fedquilt.runs.policies import Cadence
from fedquilt.training.optimizer_state import PREFIX

from . import test_merging, test_running
from .conftest import METHODS, Case, Replaying, population
from .test_running import StopNow, interrupted

ADAM = fq.LocalTraining(
    optimizer="adam",
    lr=0.01,
    epochs=1,
    batch_size=3,
    accumulate=2,
    step_schedule="warmup:2",
    keep_optimizer=True,
)
CASES = {name.split()[0]: name for name in sorted(METHODS, reverse=True)}  # one of each method
LAWS = [  # those in which clients train
    test_merging.test_order_of_clients_does_not_change_the_result_beyond_rounding,
    test_merging.test_whole_models_of_equal_weight_give_fedavg_bit_for_bit,
    test_merging.test_cells_that_nobody_trained_keep_their_value,
    test_merging.test_no_step_changes_its_arguments,
    test_running.test_records_count_exactly_the_bytes_of_the_subnets_that_travel,
    test_running.test_clients_need_nothing_but_what_travels,
    test_running.test_what_comes_back_is_part_of_what_was_sent,
    test_running.test_a_closing_phase_moves_only_statistics_up,
]


def with_adam(method: Any) -> Any:
    accumulates = not isinstance(method, fq.PFedMe)
    settings = ADAM if accumulates else replace(ADAM, accumulate=1)
    return replace(method, local_training=settings)


@pytest.fixture(scope="module", params=sorted(CASES.values()))
def adam_case(request: pytest.FixtureRequest, setup: Any) -> Case:
    method, short = with_adam(METHODS[request.param]), replace(setup, rounds=2)
    return Case(method, short, method.prepare_model(short), population())


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_laws_hold_with_adam(law, adam_case):
    needed = inspect.signature(law).parameters
    law(adam_case, **({"replaying": Replaying(adam_case)} if "replaying" in needed else {}))


def run_in(case: Case, folder: Any, watch: Any = None, *, resume: bool = False) -> Any:
    folder.mkdir(exist_ok=True)
    with case.engine(folder=folder / "clients") as engine:
        return case.run(engine, folder, watch, Cadence(checkpoint_every=1), resume=resume)


def read_kept(folder: Any) -> dict[str, dict[str, Tensor]]:
    """What clients keep at the end."""
    files = sorted((folder / "clients").glob("client-*"))
    return {path.name: read_client_state(path) or {} for path in files}


def test_adam_that_is_kept_is_a_part_of_what_a_stopped_run_resumes(adam_case, tmp_path):
    case = adam_case
    expected, scores, events = run_in(case, tmp_path / "whole")
    with pytest.raises(StopNow):
        run_in(case.anew(), tmp_path / "cut", interrupted(len(events) * 2 // 3))
    state, found, _ = run_in(case.anew(), tmp_path / "cut", resume=True)
    assert case.bits(state.params) == case.bits(expected.params)
    assert found == scores
    whole, cut = (read_kept(tmp_path / name) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    for client, tensors in whole.items():
        assert case.bits(tensors) == case.bits(cut[client])
    names = {name for tensors in whole.values() for name in tensors}
    assert any(name.startswith(f"{PREFIX}/") and name.endswith("/exp_avg") for name in names)


@pytest.mark.parametrize("name", ["heterofl dynamic", "splitmix together"])
def test_workers_give_the_same_bits_with_adam(name, setup):
    method, short = with_adam(METHODS[name]), replace(setup, rounds=2)
    case = Case(method, short, method.prepare_model(short), population())
    found = []
    for workers in (0, 2):
        with case.engine(workers) as engine:
            state, scores, _ = case.run(engine)
        found.append((case.bits(state.params), scores))
    assert found[0] == found[1]


def test_pfedme_has_nothing_to_accumulate():
    with pytest.raises(ConfigError, match=r"inner problem on every batch.*got accumulate = 2"):
        fq.PFedMe(ADAM)
