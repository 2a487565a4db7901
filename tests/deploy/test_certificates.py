"""Certificates and keys: who may read them, what they are good for, and that they stay."""

import os
import ssl
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedquilt.deploy import certificates
from fedquilt.deploy.certificates import ensure_node_key, ensure_server_certificates
from fedquilt.errors import ConfigError


@pytest.fixture
def open_umask():
    """A user whose files everybody may read."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder):
    return {path: path.read_bytes() for path in folder.iterdir()}


def trusting(authority):
    """What a client checks; Python 3.13 is as strict by default."""
    context = ssl.create_default_context(cafile=authority)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def serving(found):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(found.certificate, found.key)
    return context


def shake_hands(client_context, server_context, host):
    """A TLS handshake in memory; raises what either side has against it."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up, server_hostname=host)
    server = server_context.wrap_bio(up, down, server_side=True)
    waiting = [client, server]
    for _ in range(10):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
    assert not waiting
    client.write(b"hello")
    assert server.read() == b"hello"


@pytest.mark.usefixtures("open_umask")
def test_private_keys_are_their_owners_alone_before_anything_is_in_them(tmp_path, monkeypatch):
    seen = []

    def watched(handle, *arguments, open_file=os.fdopen):
        about = os.fstat(handle)
        seen.append((stat.S_IMODE(about.st_mode), about.st_size))
        return open_file(handle, *arguments)

    monkeypatch.setattr(os, "fdopen", watched)
    found = ensure_server_certificates(tmp_path / "certificates")
    key = ensure_node_key(tmp_path / "keys", "node-0")
    assert seen == [(0o600, 0)] * 3
    private = [found.key, tmp_path / "certificates" / "ca.key", key.private]
    assert [mode(path) for path in private] == [0o600] * 3
    assert mode(tmp_path / "certificates") == mode(tmp_path / "keys") == 0o700


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "server.example", "192.0.2.7"])
def test_the_server_is_believed_under_every_name_it_was_given(tmp_path, host):
    found = ensure_server_certificates(tmp_path, ["server.example", "192.0.2.7"])
    shake_hands(trusting(found.authority), serving(found), host)


def test_the_server_is_not_believed_under_another_name(tmp_path):
    found = ensure_server_certificates(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(trusting(found.authority), serving(found), "server.example")


def test_the_server_is_not_believed_by_those_who_trust_another_authority(tmp_path):
    found, other = (
        ensure_server_certificates(tmp_path / "a"),
        ensure_server_certificates(tmp_path / "b"),
    )
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(trusting(other.authority), serving(found), "localhost")


def test_the_certificate_is_for_servers_and_not_for_clients(tmp_path):
    found = ensure_server_certificates(tmp_path)
    client, server = trusting(found.authority), serving(found)
    client.load_cert_chain(found.certificate, found.key)
    server.load_verify_locations(found.authority)
    server.verify_mode = ssl.CERT_REQUIRED
    with pytest.raises(ssl.SSLError, match="purpose"):
        shake_hands(client, server, "localhost")


def test_what_is_there_is_used_again(tmp_path):
    first, key = ensure_server_certificates(tmp_path), ensure_node_key(tmp_path, "node-0")
    before = contents(tmp_path)
    assert ensure_server_certificates(tmp_path) == first
    assert ensure_node_key(tmp_path, "node-0") == key
    assert contents(tmp_path) == before


def test_a_new_certificate_is_of_the_same_authority_and_key(tmp_path):
    found = ensure_server_certificates(tmp_path)
    before = contents(tmp_path)
    found.certificate.unlink()
    found = ensure_server_certificates(tmp_path, ["server.example"])
    shake_hands(trusting(found.authority), serving(found), "server.example")
    after = contents(tmp_path)
    changed = {path for path in after if after[path] != before[path]}
    assert changed == {found.certificate}


def test_a_certificate_for_other_names_is_refused_and_not_replaced(tmp_path):
    found = ensure_server_certificates(tmp_path)
    before = found.certificate.read_bytes()
    with pytest.raises(ConfigError, match=r"server\.example.*remove"):
        ensure_server_certificates(tmp_path, ["server.example"])
    assert found.certificate.read_bytes() == before


def test_an_expired_certificate_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "CLOCK_MARGIN", 2 * 24 * certificates.CLOCK_MARGIN)
    monkeypatch.setattr(certificates, "VALID_DAYS", -1)
    with pytest.raises(ConfigError, match="expired on"):
        ensure_server_certificates(tmp_path)


def test_a_nodes_keys_belong_together_and_to_it_alone(tmp_path):
    keys = [ensure_node_key(tmp_path, f"node-{i}") for i in range(2)]
    halves = []
    for key in keys:
        private = load_ssh_private_key(key.private.read_bytes(), password=None)
        assert isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == load_ssh_public_key(key.public.read_bytes())
        halves.append(private.public_key())
    assert halves[0] != halves[1]


def test_a_broken_key_is_named(tmp_path):
    (tmp_path / "node-0").write_text("nothing")
    with pytest.raises(ConfigError, match="node-0"):
        ensure_node_key(tmp_path, "node-0")
