"""Weights from a file: all that fits is taken, and nothing is left out without a word."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedquilt.cli import main
from fedquilt.errors import ConfigError
from fedquilt.models.nefl import BasicBlock, ResNet, ViT
from fedquilt.models.pretrained import ShapeMismatch, load_pretrained


def net(num_classes: int = 10, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return ResNet(BasicBlock, (1, 1), channels=(4, 6), num_classes=num_classes)


def weights(num_classes: int = 10) -> dict[str, Tensor]:
    """The state dict of a net that has been trained a little: no value is an initial one."""
    state = net(num_classes, seed=1).state_dict()
    return {n: t + 1 for n, t in state.items()}


def written(path, content):
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


def assert_same(state, expected):
    torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=0)


# what can be read


@pytest.mark.parametrize("name", ["net.safetensors", "net.pt", "net.pth"])
def test_files_of_the_same_net_are_taken_whole(tmp_path, name):
    model, found = net(), weights()
    tensors = dict(model.named_parameters())
    report = load_pretrained(model, written(tmp_path / name, found))
    assert_same(model.state_dict(), found)
    assert report.loaded == tuple(found)
    assert not report.missing + report.different + report.unused + report.counters
    assert str(report) == f"{len(found)} of {len(found)} tensors start from {tmp_path / name}"
    assert all(tensors[n] is p and p.requires_grad for n, p in model.named_parameters())


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "module.encoder."])
def test_wrappers_and_prefixes_are_seen_through(tmp_path, wrapper, prefix):
    model, found = net(), weights()
    renamed = {f"{prefix}{n}": t for n, t in found.items()}
    path = written(tmp_path / "net.pt", {"epoch": 3, wrapper: renamed})
    report = load_pretrained(model, str(path))
    assert_same(model.state_dict(), found)
    assert (report.wrapper, report.prefix) == (wrapper, prefix)
    assert f"'{wrapper}'" in report.describe()
    assert not prefix or f"without '{prefix}'" in report.describe()


def test_a_prefix_need_not_be_that_of_all_names(tmp_path):
    model, found = net(), weights()
    renamed = {n if n.startswith("fc") else f"body.{n}": t for n, t in found.items()}
    assert load_pretrained(model, written(tmp_path / "net.pt", renamed)).prefix == "body."
    assert_same(model.state_dict(), found)


def test_a_copy_under_a_prefix_does_not_go_over_the_names_themselves(tmp_path):
    model, found = net(), weights()
    copies = {f"average.{n}": t + 1 for n, t in found.items()}
    report = load_pretrained(model, written(tmp_path / "net.pt", {**copies, **found}), strict=False)
    assert_same(model.state_dict(), found)
    assert report.prefix == ""
    assert set(report.unused) | set(report.counters) == set(copies)


def test_other_precisions_become_the_models(tmp_path):
    model = net()
    half = {n: t.half() if t.is_floating_point() else t for n, t in weights().items()}
    load_pretrained(model, written(tmp_path / "net.safetensors", half))
    assert model.conv1.weight.dtype == torch.float32
    assert_same(model.conv1.state_dict(), {"weight": half["conv1.weight"].float()})


# the classifier head, and counters


def test_a_head_of_other_classes_keeps_its_initial_values_and_is_reported(tmp_path):
    model, before = net(10), net(10).state_dict()
    path = written(tmp_path / "net.pt", weights(num_classes=100))
    report = load_pretrained(model, path)
    assert report.different == (
        ShapeMismatch("fc.weight", (100, 6), (10, 6)),
        ShapeMismatch("fc.bias", (100,), (10,)),
    )
    assert "another shape in the file: fc.weight (100×6 there, 10×6 here)" in str(report)
    expected = {n: before[n] if n.startswith("fc") else t for n, t in weights().items()}
    assert_same(model.state_dict(), expected)


def test_a_head_may_be_missing_but_is_reported(tmp_path):
    found = {n: t for n, t in weights().items() if not n.startswith("fc")}
    report = load_pretrained(net(), written(tmp_path / "net.safetensors", found))
    assert report.missing == ("fc.weight", "fc.bias")
    assert "not in the file: fc.weight, fc.bias" in str(report)


def test_a_head_that_takes_other_features_is_refused(tmp_path):
    found = {**weights(), "fc.weight": torch.ones(10, 7)}
    with pytest.raises(ConfigError, match=r"another shape: fc.weight \(10×7 there, 10×6 here\)"):
        load_pretrained(net(), written(tmp_path / "net.pt", found))


def test_the_head_of_a_vit_is_its_last_layer(tmp_path):
    sizes = {"image_size": 8, "patch_size": 4, "dim": 6, "depth": 1, "heads": 2, "mlp_dim": 8}
    path = written(tmp_path / "vit.safetensors", ViT(**sizes, num_classes=3).state_dict())
    report = load_pretrained(ViT(**sizes), path)
    assert [d.name for d in report.different] == ["head.weight", "head.bias"]


def test_counters_of_batches_are_taken_but_not_missed(tmp_path):
    counters = [n for n in weights() if n.endswith("num_batches_tracked")]
    fewer = {n: t for n, t in weights().items() if n not in counters[1:]}
    more = {**fewer, "old.num_batches_tracked": torch.tensor(4)}
    model = net()
    report = load_pretrained(model, written(tmp_path / "net.pt", more))
    assert counters[0] in report.loaded
    assert model.get_buffer(counters[0]) == 1
    assert model.get_buffer(counters[1]) == 0
    assert report.counters == (*counters[1:], "old.num_batches_tracked")
    assert "of no importance" in str(report)


def test_a_tied_tensor_needs_one_of_its_names(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    model = Tied()
    found = {n: torch.full(t.shape, 5.0) for n, t in model.state_dict().items()}
    found.pop("b.weight")
    report = load_pretrained(model, written(tmp_path / "net.safetensors", found))
    assert not report.missing
    assert (model.b.weight == 5).all()


# what is refused


def damaged() -> dict[str, Tensor]:
    """Weights with one tensor gone, one of another shape, and one too many."""
    found = weights()
    found.pop("layer1.0.conv1.weight")
    return {**found, "bn1.weight": torch.ones(3), "extra.weight": torch.ones(2)}


def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path):
    model, before = net(), net().state_dict()
    path = written(tmp_path / "net.pt", damaged())
    with pytest.raises(ConfigError) as refusal:
        load_pretrained(model, path)
    for words in (
        "not in the file: layer1.0.conv1.weight;",
        "of another shape: bn1.weight (3 there, 4 here);",
        "not in the model: extra.weight;",
        "model.weights_strict = false",
    ):
        assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert_same(model.state_dict(), before)


def test_what_does_not_fit_can_be_left_out_and_is_reported(tmp_path):
    model, before = net(), net().state_dict()
    report = load_pretrained(model, written(tmp_path / "net.pt", damaged()), strict=False)
    assert report.missing == ("layer1.0.conv1.weight",)
    assert report.different == (ShapeMismatch("bn1.weight", (3,), (4,)),)
    assert report.unused == ("extra.weight",)
    kept = {"layer1.0.conv1.weight", "bn1.weight"}
    expected = {n: before[n] if n in kept else t for n, t in weights().items()}
    assert_same(model.state_dict(), expected)
    for words in (*kept, "extra.weight"):
        assert words in str(report)


def test_long_lists_are_cut_short_in_words_only(tmp_path):
    extra = {f"extra{i}": torch.ones(1) for i in range(10)}
    path = written(tmp_path / "net.pt", {**weights(), **extra, "epoch": 3})
    with pytest.raises(ConfigError, match="extra0, extra1, extra2 and 8 more"):
        load_pretrained(net(), path)
    assert load_pretrained(net(), path, strict=False).unused == (*extra, "epoch")


@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_another_model_are_refused_always(tmp_path, strict):
    path = written(tmp_path / "net.safetensors", nn.Linear(3, 2).state_dict())
    with pytest.raises(ConfigError, match=r"no tensor .* the file has bias, weight; give"):
        load_pretrained(net(), path, strict=strict)


class Foreign:
    """Something that only code could read."""


def test_files_that_hold_no_weights_are_refused_with_one_sentence(tmp_path):
    whole = written(tmp_path / "whole.safetensors", weights()).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-10])
    (tmp_path / "text.safetensors").write_text("weights")
    (tmp_path / "text.pt").write_text("weights")
    (tmp_path / "empty.pt").write_bytes(b"")
    written(tmp_path / "code.pt", {"model": Foreign()})
    written(tmp_path / "number.pt", 3)
    written(tmp_path / "names.pt", {"names": ["a", "b"]})
    shutil.copy(written(tmp_path / "zip.pt", weights()), tmp_path / "cut.pt")
    with (tmp_path / "cut.pt").open("r+b") as file:
        file.truncate(1000)
    for name in ("cut.safetensors", "text.safetensors", "text.pt", "empty.pt", "cut.pt", "code.pt"):
        with pytest.raises(ConfigError, match=f"{name}' cannot be read as weights; give"):
            load_pretrained(net(), tmp_path / name)
    for name in ("number.pt", "names.pt"):
        with pytest.raises(ConfigError, match=f"{name}' holds no tensors by name; give"):
            load_pretrained(net(), tmp_path / name)
    with pytest.raises(ConfigError, match=r"none\.pt' does not exist"):
        load_pretrained(net(), tmp_path / "none.pt")


# runs


def fedquilt(capsys, *arguments):
    """The exit code of a command and what it printed."""
    with pytest.raises(SystemExit) as ending:
        main([str(a) for a in arguments])
    printed = capsys.readouterr()
    return ending.value.code, printed.out, printed.err


TINY = ["--model", "mlp", "--clients", "2", "--budgets", "1,0.5", "--workers", "0"]


@pytest.fixture
def file(tmp_path):
    """Weights of the tiny model for 12 classes; the digits have 10."""
    shapes = {
        "features.1.weight": (8, 64),
        "features.1.bias": (8,),
        "classifier.weight": (12, 8),
        "classifier.bias": (12,),
    }
    found = {f"module.{n}": torch.full(shape, 0.01) for n, shape in shapes.items()}
    return written(tmp_path / "tiny.safetensors", found)


def test_a_run_starts_from_weights_and_goes_on_without_their_file(tmp_path, file, capsys):
    asked = ["train", *TINY, "--set", "model.hidden=[8]", "--set", f"model.weights={file}"]
    code, out, err = fedquilt(capsys, *asked, "--rounds", 2, "--out", tmp_path / "whole")
    assert code == 0, err
    assert out.count("2 of 4 tensors start from") == 1
    assert "without 'module.'" in out
    assert "classifier.weight (12×8 there, 10×8 here)" in out
    initial = load_file(tmp_path / "whole" / "initial.safetensors")
    assert (initial["features.1.weight"] == 0.01).all()
    assert initial["classifier.weight"].unique().numel() > 2  # drawn by the seed

    fedquilt(capsys, *asked, "--rounds", 1, "--out", tmp_path / "halves")
    file.unlink()
    resumed = ["train", "--resume", tmp_path / "halves", "--rounds", 2, "--json"]
    code, out, err = fedquilt(capsys, *resumed)
    assert code == 0, err
    assert json.loads(out)["rounds"] == 2
    assert "start from" not in err
    bits = [tmp_path / name / "checkpoints" / "round-000002" for name in ("whole", "halves")]
    assert_same(*(load_file(folder / "params.safetensors") for folder in bits))

    code, _, err = fedquilt(capsys, "evaluate", tmp_path / "halves", "--workers", 0)
    assert code == 0, err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--set", "model.hidden=[8, 4]"], "weights_strict = false"),
        (["--method", "splitmix"], "SplitMix draws the initial values"),
        (["--set", "model.weights=none.pt"], "'none.pt' does not exist"),
    ],
)
def test_a_run_that_would_not_use_its_weights_is_refused(tmp_path, file, capsys, changes, words):
    asked = [
        "train",
        *TINY,
        "--set",
        "model.hidden=[8]",
        "--set",
        f"model.weights={file}",
        *changes,
        "--out",
        tmp_path / "run",
    ]
    code, out, err = fedquilt(capsys, *asked)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_may_take_what_fits(tmp_path, file, capsys):
    strict = ["--set", "model.weights_strict=false", "--set", "model.hidden=[8, 4]"]
    asked = [
        "train",
        *TINY,
        "--set",
        "model.hidden=[8]",
        "--set",
        f"model.weights={file}",
        *strict,
        "--rounds",
        1,
    ]
    code, out, err = fedquilt(capsys, *asked, "--out", tmp_path / "run")
    assert code == 0, err
    assert "not in the file: features.3.weight, features.3.bias" in out
