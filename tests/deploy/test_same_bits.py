"""Every method has the same bits on one machine, simulated by Flower, and deployed on real nodes.

Deployed: a SuperLink and three SuperNodes as processes, with TLS and authenticated nodes.
"""

import pytest

from fedquilt.config import checked, override, source_of
from fedquilt.deploy.federation import Federation
from fedquilt.deploy.launch import Place, spelled_out, trained
from fedquilt.deploy.site import settings_of
from fedquilt.runs.configured import ready
from fedquilt.runs.loop import ignore

from .conftest import CLIENTS, SETTINGS
from .test_engine import METHODS, records, same

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(900)]
PAPERS = ("fedavg", "heterofl", "splitmix", "nefl", "apfl", "adds")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    nodes = [{"partition-id": number} for number in range(CLIENTS)]
    with Federation(tmp_path_factory.mktemp("deployed"), nodes) as deployed:
        deployed.wait()
        yield Place(deployed.connection, deployed.nodes)


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    with Federation(tmp_path_factory.mktemp("simulated"), simulation=True) as simulated:
        yield Place(simulated.connection, ())


@pytest.mark.parametrize("method", PAPERS)
def test_a_method_has_the_same_bits_on_every_engine(tmp_path, federation, simulation, method):
    named = {f"{name.replace('__', '.')}": value for name, value in METHODS[method].items()}
    config = settings_of({**SETTINGS, "method.name": method, **named})

    def local(workers):
        changed = checked(override(config.model_dump(), {"run.workers": workers}))
        source, folder = source_of(changed), tmp_path / f"local-{workers}"
        return ready(spelled_out(changed, None), source, folder, resume=False)(ignore)

    def flower(name, place):
        is_simulation, told = place is simulation, []
        spelled = spelled_out(config, None if is_simulation else place)
        folder = tmp_path / name
        run = trained(spelled, folder, told.append, place=place, simulation=is_simulation)
        assert run is not None, told
        return run

    one = local(1)
    for other in (local(2), flower("simulated", simulation), flower("deployed", federation)):
        assert same(one, other)
        assert one.scores == other.scores
        assert records(one) == records(other)
