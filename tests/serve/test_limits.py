"""Malformed, huge and slow requests get a sentence, and others are answered all the while."""

import io
import json
import socket
import struct
import zlib
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedquilt as fq
from fedquilt.serve import Limits
from fedquilt.web import listen

BODY_BYTES = 40_000
CLIENT = httpx.Client(timeout=20)
GOOD = json.dumps({"inputs": np.zeros((1, 8, 8)).tolist()}).encode()


@pytest.fixture(scope="session", autouse=True)
def _close_client():
    yield
    CLIENT.close()


@pytest.fixture(scope="module")
def small(serve, narrow_run):
    """A server with little patience."""
    return serve(narrow_run, Limits(body_bytes=BODY_BYTES, seconds=0.5, examples=8, pixels=10_000))


def post(address, body, kind="application/json", query=""):
    headers = {"content-type": kind}
    return CLIENT.post(f"{address}predict{query}", content=body, headers=headers)


def assert_answers(address):
    assert post(address, GOOD).status_code == 200


def assert_sentence(reply, status, secret):
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"}
    assert len(reply.json()["error"]) > 10
    assert str(secret) not in reply.text
    assert "Traceback" not in reply.text


def make_npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def make_bomb():
    """A PNG of a few bytes that says it is 30000 pixels wide and high."""

    def chunk(kind, data):
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


MALFORMED = {
    "nothing": (b"", "application/json", 400),
    "no JSON": (b"{", "application/json", 400),
    "deep JSON": (b'{"inputs": ' + b"[" * 9_000, "application/json", 400),
    "deep numbers": (b'{"inputs": ' + b"[" * 90 + b"]" * 90 + b"}", "application/json", 422),
    "a list": (b"[1, 2]", "application/json", 422),
    "two inputs": (b'{"inputs": [], "text": ""}', "application/json", 422),
    "an unknown name": (b'{"path": "/etc/passwd"}', "application/json", 422),
    "words": (b'{"inputs": ["a"]}', "application/json", 422),
    "ragged": (b'{"inputs": [[1, 2], [3]]}', "application/json", 422),
    "another shape": (b'{"inputs": [[1, 2], [3, 4]]}', "application/json", 422),
    "no examples": (b'{"inputs": []}', "application/json", 422),
    "not finite": (GOOD.replace(b"0.0", b"NaN", 1), "application/json", 422),
    "infinite": (GOOD.replace(b"0.0", b"1e999", 1), "application/json", 422),
    "pixels above 255": (b'{"pixels": [[[256]]]}', "application/json", 422),
    "halves of pixels": (b'{"pixels": [[[0.5]]]}', "application/json", 422),
    "no text model": (b'{"text": "hi"}', "application/json", 422),
    "an empty image": (b"", "image/png", 400),
    "no image": (b"\x89PNG\r\n\x1a\nrubbish", "image/png", 400),
    "a GIF": (b"GIF89a\x01\x00\x01\x00\x00\x00\x00;", "image/png", 400),
    "a decompression bomb": (make_bomb(), "image/png", 413),
    "no npy": (b"\x93NUMPY", "application/x-npy", 400),
    "a pickle": (make_npy(np.array([print, {}], dtype=object)), "application/x-npy", 400),
    "words in npy": (make_npy(np.array(["a"])), "application/x-npy", 422),
    "another type": (b"<x/>", "application/xml", 415),
    "no UTF-8": (b"\xff\xfe", "text/plain", 400),
    "too large": (b" " * (BODY_BYTES + 1), "application/json", 413),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_gets_a_sentence_without_paths(small, narrow_run, name):
    body, kind, status = MALFORMED[name]
    assert_sentence(post(small, body, kind), status, narrow_run.folder.parent)
    assert_answers(small)


QUERIES = (
    "size=2",
    "size=x",
    "size=nan",
    "size=0.01",
    "robustness=0.5",
    "params=1",
    "width=1",
    "a=%2F",
)


@pytest.mark.parametrize("query", QUERIES)
def test_a_wish_that_cannot_be_met_gets_a_sentence(small, narrow_run, query):
    assert_sentence(post(small, GOOD, query=f"?{query}"), 422, narrow_run.folder.parent)


@given(
    st.binary(max_size=200), st.sampled_from(["application/json", "image/png", "application/x-npy"])
)
@settings(max_examples=40, deadline=None)
def test_whatever_bytes_arrive_the_answer_is_a_sentence(small, narrow_run, body, kind):
    assert_sentence(post(small, body, kind), post(small, body, kind).status_code, narrow_run.folder)


def test_too_many_examples_are_turned_away(small, narrow_run):
    body = json.dumps({"pixels": np.zeros((9, 1, 8, 8), int).tolist()}).encode()
    assert_sentence(post(small, body), 413, narrow_run.folder)


@pytest.mark.parametrize(
    "path", ["nothing", "static/../app.py", "static/%2e%2e%2fapp.py", "model/x"]
)
def test_other_addresses_give_no_files(small, narrow_run, path):
    assert_sentence(CLIENT.get(f"{small}{path}"), 404, narrow_run.folder)


def test_a_huge_body_without_a_length_is_cut_off(small, narrow_run):
    def send():
        for _ in range(100):
            yield b" " * 1000

    assert_sentence(post(small, send()), 413, narrow_run.folder)
    assert_answers(small)


def connect(address):
    where = urlsplit(address)
    return socket.create_connection((where.hostname, where.port), timeout=20)


def test_slow_bodies_end_with_a_sentence_and_hold_up_nobody(small):
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    slow = [connect(small) for _ in range(20)]
    for client in slow:
        client.sendall(head)
    assert_answers(small)  # while twenty requests are half read
    for client in slow:
        assert client.recv(1000).startswith(b"HTTP/1.1 408")
        client.close()
    assert_answers(small)


def test_slow_headers_are_cut_off_and_hold_up_nobody(serve, narrow_run, monkeypatch):
    monkeypatch.setattr(listen, "HEADER_SECONDS", 0.3)
    address = serve(narrow_run)
    silent, slow, kept = connect(address), connect(address), connect(address)
    slow.sendall(b"POST /predict HTT")
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    kept.sendall(whole)
    assert kept.recv(1000).startswith(b"HTTP/1.1 200")
    kept.sendall(whole[:20])  # the second request on a connection is timed as well
    assert_answers(address)
    for client in (silent, slow, kept):
        assert client.recv(1000) == b""
        client.close()
    assert_answers(address)


def test_requests_that_are_broken_off_harm_nobody(small):
    for _ in range(10):
        client = connect(small)
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n{")
        client.close()
    assert_answers(small)


def test_limits_that_make_no_sense_are_named():
    with pytest.raises(fq.FedquiltError, match="'examples' is a number above 0, got 0"):
        Limits(examples=0)
