"""What is used of Flower without being documented, asked of a real SuperLink."""

import pytest

from fedquilt.deploy.certificates import ensure_node_key
from fedquilt.deploy.federation import HOST, Federation
from fedquilt.deploy.flower_internals import SuperLinkClient
from fedquilt.errors import FederationError

LONG = 300  # seconds: machines may be busy


@pytest.mark.slow
@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("insecure", [False, True])
def test_a_superlink_tells_about_its_nodes(tmp_path, insecure):
    """A registered node is not online, and a node that connects is found by its log and key."""
    keys = [ensure_node_key(tmp_path, name) for name in ("known", "unknown")]
    nodes = [{"partition-id": 0}]
    with Federation(tmp_path / "federation", nodes, insecure=insecure) as federation:
        authority = None if insecure else federation.folder / "certificates" / "ca.crt"
        client = SuperLinkClient(HOST, int(federation.address.rpartition(":")[2]), authority)
        assert client.is_available()
        for _ in range(2):  # the second time changes nothing
            client.register(keys[0].public, "known")
        assert not client.is_online(keys[0].public)
        assert not client.is_online(keys[1].public)
        federation.wait(LONG)
        assert len(client.list_online_nodes()) == 1
        if not insecure:
            assert client.is_online(federation.folder / "keys" / "node-0.pub")
    assert not client.is_available()
    assert client.list_online_nodes() == set()
    with pytest.raises(FederationError, match="does not respond"):
        client.register(keys[1].public, "unknown")
