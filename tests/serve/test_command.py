"""``fedquilt serve`` as a user starts it: it prints where, asks for its token, and ends cleanly."""

import json
import signal
import subprocess
import sys

import httpx


def read_document(stream):
    lines = []
    for line in stream:
        lines.append(line)
        if line == "}\n":
            break
    return json.loads("".join(lines))


def test_the_command_serves_with_a_token_until_it_is_interrupted(narrow_run):
    command = [sys.executable, "-m", "fedquilt", "serve", str(narrow_run.folder)]
    options = ["--host", "0.0.0.0", "--port", "0", "--json"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        document = read_document(process.stdout)
        base, _, token = document["url"].partition("?token=")
        base = base.replace("0.0.0.0", "127.0.0.1")
        assert [sized["size"] for sized in document["sizes"]] == [1.0, 0.5, 0.25]
        assert httpx.get(f"{base}model").status_code == 401
        facts = httpx.get(f"{base}model", headers={"authorization": f"Bearer {token}"})
        assert facts.json()["sizes"] == document["sizes"]
        assert str(narrow_run.folder.parent) not in facts.text
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
