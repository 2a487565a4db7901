"""Every method has the same bits on one machine, simulated by Flower, and deployed on real nodes.

Deployed: a SuperLink and three SuperNodes as processes, with TLS and authenticated nodes.
"""

import pytest

from fedquilt.deploy.federation import Federation
from fedquilt.deploy.launch import RunningFederation, resolve_for_nodes, train_on_flower
from fedquilt.deploy.node_context import parse_run_config
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


@pytest.mark.parametrize("case", CASES)
def test_a_method_has_the_same_bits_on_every_engine(tmp_path, federation, simulation, case):
    named = {f"{name.replace('__', '.')}": value for name, value in CASES[case].items()}
    config = parse_run_config({**SETTINGS, **named})

    def local(workers):
        changed = load_config(override_settings(config.model_dump(), {"run.workers": workers}))
        source, folder = load_source(changed), tmp_path / f"local-{workers}"
        return start_run(plan_run(resolve_for_nodes(changed, None), source, folder)).train()

    def flower(name, place):
        is_simulation, told = place is simulation, []
        spelled = resolve_for_nodes(config, None if is_simulation else place)
        folder = tmp_path / name
        run = train_on_flower(
            spelled, folder, told.append, federation=place, simulation=is_simulation
        )
        assert run is not None, told
        return run

    one = local(1)
    for other in (local(2), flower("simulated", simulation), flower("deployed", federation)):
        assert same(one, other)
        assert one.scores == other.scores
        assert records(one) == records(other)
