"""The page that follows runs: it finds them, tells what they record, and changes nothing."""

import hashlib
import json
import shutil

import httpx
import pytest
import torch

import fedquilt as fq
from fedquilt.watch import RunWatcher, create_app
from fedquilt.watch.app import make_document
from fedquilt.web.access import Access
from fedquilt.web.listen import run_in_background


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two finished runs, one of them deeper, and other files."""
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    pair = x, (x.sum(1) > 0).long()
    clients = fq.make_clients(pair, test=pair, count=2, budgets=[1, 0.5])
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    local = fq.LocalTraining(lr=0.05, epochs=1, batch_size=8)
    folder = tmp_path_factory.mktemp("secret-place")
    for name in ("first", "deep/second"):
        fq.train(net, x[:1], fq.HeteroFL(local), clients, 2, workers=0, out=folder / name)
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("x")
    return folder


def read(watcher, *names):
    return json.loads(make_document(watcher, names))


def test_runs_are_found_wherever_they_are_below_a_folder(folder):
    names = {run.name for run in RunWatcher([folder]).find_runs()}
    assert names == {"first", "second"}
    assert [r.name for r in RunWatcher([folder / "first"]).find_runs()] == ["first"]
    with pytest.raises(fq.FedquiltError, match="is not a directory"):
        RunWatcher([folder / "nothing"])


def test_runs_of_one_name_are_told_apart(folder, tmp_path):
    shutil.copytree(folder / "first", tmp_path / "a" / "first")
    shutil.copytree(folder / "first", tmp_path / "b" / "first")
    names = {run.name for run in RunWatcher([tmp_path]).find_runs()}
    assert names == {"a/first", "b/first"}


def test_the_document_has_what_the_runs_have_recorded(folder):
    document = read(RunWatcher([folder]), "first", "second")
    assert "<h2>first</h2>" in document["parts"]["runs"]
    assert "<h2>second</h2>" in document["parts"]["runs"]
    figures = {figure["title"]: figure for figure in document["figures"]}
    lines = [json.loads(line) for line in (folder / "first/metrics.jsonl").read_text().splitlines()]
    losses = [[r["round"], r["loss"]] for r in lines if "scores" not in r]
    drawn = figures["Training loss by round"]["curves"]["first"]
    assert drawn == [[r, pytest.approx(loss, rel=1e-5)] for r, loss in losses]
    assert set(figures["Every size of second by round"]["curves"]) == {"size 1", "size 0.5"}
    assert "Coverage of first" in figures
    only = read(RunWatcher([folder]), "second")
    assert "<h2>first</h2>" not in only["parts"]["runs"]


def test_new_records_appear_and_half_written_ones_do_not(folder, tmp_path):
    shutil.copytree(folder / "first", tmp_path / "run")
    metrics, timing = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "timing.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:1]))
    watcher = RunWatcher([tmp_path])

    def rounds():
        figures = {f["title"]: f for f in read(watcher)["figures"]}
        return len(figures["Training loss by round"]["curves"]["run"])

    assert rounds() == 1
    metrics.write_text("".join(lines[:1]) + lines[1][:20])
    assert rounds() == 1  # as it was before
    metrics.write_text("".join(lines))
    assert rounds() == 2
    assert timing.exists()


def test_watching_changes_no_file_and_tells_no_path(folder):
    def fingerprint():
        return {
            p: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()
        }

    before = fingerprint()
    text = make_document(RunWatcher([folder]), ["first", "second"])
    assert fingerprint() == before
    assert str(folder) not in text
    assert "secret-place" not in text


def test_a_damaged_run_is_named_without_its_path(folder, tmp_path):
    shutil.copytree(folder / "first", tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    text = make_document(RunWatcher([tmp_path]), [])
    assert "damaged" in text
    assert str(tmp_path) not in text


def test_the_server_answers_only_what_is_new_and_only_reads(folder):
    app = create_app(RunWatcher([folder]))
    with run_in_background(app, Access("127.0.0.1", None)) as address, httpx.Client() as client:
        page = client.get(address)
        assert 'data-source="/data"' in page.text
        assert "https://" not in page.text
        first = client.get(f"{address}data?run=first")
        tag = first.headers["etag"]
        headers = {"if-none-match": tag}
        # the load of the machine is part of it, and may have changed
        assert client.get(f"{address}data?run=first", headers=headers).status_code in (200, 304)
        for path in ("static/../reader.py", "static/%2e%2e", "nothing"):
            assert client.get(f"{address}{path}").status_code == 404
        for method in ("POST", "PUT", "DELETE"):
            assert client.request(method, f"{address}data").status_code == 405
        odd = client.get(f"{address}data?run=../../etc&run=%00")
        assert odd.status_code == 200  # names that are not known choose nothing
        assert "etc" not in odd.json()["parts"]["runs"]
