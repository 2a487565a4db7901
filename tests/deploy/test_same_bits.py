"""Every method has the same bits on one machine, simulated by Flower, and deployed on real nodes.

Deployed: a SuperLink and three SuperNodes as processes, with TLS and authenticated nodes.
"""

import pytest

from fedquilt.deploy.federation import Federation
from fedquilt.deploy.launch import RunningFederation, resolve_for_nodes, train_on_flower
from fedquilt.deploy.node_context import parse_run_config
from fedquilt.federation.privacy.noise import read_secret
from fedquilt.runs.from_config import plan_run
from fedquilt.runs.plan import start_run
from fedquilt.settings.load import load_config, override_settings
from fedquilt.settings.resolve import load_source

from .conftest import CLIENTS, SETTINGS
from .test_engine import METHODS, records, same

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(900)]
PAPERS = ("fedavg", "heterofl", "splitmix", "nefl", "apfl", "adds")
CASES = {name: {"method__name": name, **METHODS[name]} for name in PAPERS}
CASES["secure"] = {"method__name": "fedavg", "secure_aggregation__threshold": 2}
HOSTILE = {
    "method__name": "heterofl",
    "method__fraction": 1.0,
    "attacks__name": "backdoor",
    "attacks__clients": "[1]",
    "privacy__noise_multiplier": 0.1,
    "model__norm": "group",
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    nodes = [{"partition-id": number} for number in range(CLIENTS)]
    with Federation(tmp_path_factory.mktemp("deployed"), nodes) as deployed:
        deployed.wait()
        yield RunningFederation(deployed.connection, deployed.nodes)


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    with Federation(tmp_path_factory.mktemp("simulated"), simulation=True) as simulated:
        yield RunningFederation(simulated.connection, ())


def parse_case(changes):
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return parse_run_config({**SETTINGS, **named})


def train_locally(config, folder, workers):
    changed = load_config(override_settings(config.model_dump(), {"run.workers": workers}))
    source = load_source(changed)
    return start_run(plan_run(resolve_for_nodes(changed, None), source, folder)).train()


def train_on_nodes(config, folder, place):
    is_simulation, told = not place.nodes, []
    spelled = resolve_for_nodes(config, None if is_simulation else place)
    run = train_on_flower(spelled, folder, told.append, federation=place, simulation=is_simulation)
    assert run is not None, told
    return run


@pytest.mark.parametrize("case", CASES)
def test_a_method_has_the_same_bits_on_every_engine(tmp_path, federation, simulation, case):
    config = parse_case(CASES[case])
    one = train_locally(config, tmp_path / "one", 1)
    others = (
        train_locally(config, tmp_path / "two", 2),
        train_on_nodes(config, tmp_path / "simulated", simulation),
        train_on_nodes(config, tmp_path / "deployed", federation),
    )
    for other in others:
        assert same(one, other)
        assert one.scores == other.scores
        assert records(one) == records(other)


def test_an_attacked_private_run_on_real_nodes_is_repeated_here_from_its_secret(
    tmp_path, federation, monkeypatch
):
    """Client 1 teaches a backdoor; cohorts and noise come from a secret that the server drew."""
    config = parse_case(HOSTILE)
    deployed = train_on_nodes(config, tmp_path / "deployed", federation)
    secret = read_secret(tmp_path / "deployed" / "secret.key")
    monkeypatch.setattr("fedquilt.runs.plan.make_secret", lambda: secret)
    here = train_locally(config, tmp_path / "here", 2)
    assert same(here, deployed)
    assert here.scores == deployed.scores
    assert records(here) == records(deployed)
    assert here.info.attack == deployed.info.attack
    assert all(record["privacy"]["epsilon"] > 0 for record in records(deployed))
    assert all("backdoor_success" in score.metrics for score in deployed.scores)
