"""Only programs of this machine, or those that know the token, get an answer."""

import httpx
import pytest

import fedquilt as fq
from fedquilt.web.access import Access, choose_access
from fedquilt.web.listen import run_in_background

TOKEN = "correct-horse-battery"


async def app(scope, receive, send):
    """Says one word, whatever is asked."""
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": message["type"] + ".complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"word"})


@pytest.fixture(scope="module")
def guarded():
    with run_in_background(app, Access("127.0.0.1", TOKEN)) as address:
        yield address


def test_the_address_for_a_browser_brings_the_token(guarded):
    assert guarded.endswith(f"/?token={TOKEN}")


def test_without_the_token_there_is_no_answer_but_health(guarded):
    base = guarded.partition("?")[0]
    for headers in ({}, {"authorization": "Bearer wrong"}, {"cookie": "fedquilt=x; ;;=,"}):
        reply = httpx.get(f"{base}docs", headers=headers)
        assert reply.status_code == 401
        assert "word" not in reply.text
        assert TOKEN not in reply.text
    assert httpx.get(f"{base}?token=wrong").status_code == 401
    assert httpx.get(f"{base}health").text == "word"


def test_the_token_is_taken_from_the_header_or_moves_from_the_address_to_a_cookie(guarded):
    base = guarded.partition("?")[0]
    assert httpx.get(base, headers={"authorization": f"Bearer {TOKEN}"}).text == "word"
    with httpx.Client() as browser:
        moved = browser.get(f"{base}docs?token={TOKEN}&a=1")
        assert moved.status_code == 303
        assert moved.headers["location"] == "/docs?a=1"
        assert "httponly" in moved.headers["set-cookie"].lower()
        assert browser.get(f"{base}docs").text == "word"


def test_a_redirect_leads_to_no_other_host(guarded):
    base = guarded.partition("?")[0]
    moved = httpx.get(f"{base}/evil.example/?token={TOKEN}")
    assert moved.headers["location"] == "/evil.example/"


def test_a_local_server_answers_to_local_names_only():
    with run_in_background(app, Access("127.0.0.1", None)) as address:
        port = address.rstrip("/").rpartition(":")[2]
        for host in ("localhost", "127.0.0.1", f"localhost:{port}", f"[::1]:{port}"):
            assert httpx.get(address, headers={"host": host}).text == "word"
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example"):
            reply = httpx.get(address, headers={"host": host})
            assert reply.status_code == 421
            assert "word" not in reply.text


def test_answers_forbid_frames_other_hosts_and_guessed_types(guarded):
    headers = httpx.get(guarded.partition("?")[0] + "health").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"


def test_a_token_is_made_when_others_can_connect_and_not_on_loopback():
    assert choose_access("127.0.0.1", None).token is None
    first, second = choose_access("0.0.0.0", None).token, choose_access("::", None).token
    assert len(first) >= 32
    assert first != second
    assert choose_access("127.0.0.1", TOKEN).token == TOKEN
    with pytest.raises(fq.FedquiltError, match="at least 16"):
        choose_access("0.0.0.0", "short")


def test_a_port_that_is_taken_is_named():
    with run_in_background(app, Access("127.0.0.1", None)) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        again = run_in_background(app, Access("127.0.0.1", None), port)
        with pytest.raises(fq.FedquiltError, match=f"port {port}"):
            again.__enter__()
