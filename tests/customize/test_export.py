import json
import subprocess
import sys

import onnxruntime
import pytest
import torch
from safetensors import safe_open
from torch import nn

from fedquilt.customize import bundle
from fedquilt.customize.export import export
from fedquilt.errors import CheckpointError, ConfigError, FedquiltError
from fedquilt.structure.cut import build
from fedquilt.structure.groups import Structure

EXAMPLE = torch.zeros(2, 1, 8, 8)


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    structure = Structure.trace(net, EXAMPLE)
    return build(net, structure, structure.subnet(0.5)).eval()


@pytest.fixture(scope="module")
def images():
    return torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def expected(model, images):
    with torch.no_grad():
        return model(images)


def test_safetensors_hold_the_weights_and_what_they_are(small, images, tmp_path):
    path = export(small, tmp_path / "small.safetensors", EXAMPLE, {"width": 0.5})
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["fedquilt"]) == {"width": 0.5}
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert torch.equal(torch.func.functional_call(small, values, images), expected(small, images))


def test_pt2_runs_without_fedquilt_on_any_batch(small, images, tmp_path):
    path = export(small, tmp_path / "small.pt2", EXAMPLE)
    torch.save(images, tmp_path / "x.pt")
    code = (
        "import sys, torch; m = torch.export.load(sys.argv[1]).module(); "
        "torch.save(m(torch.load(sys.argv[2])).detach(), sys.argv[3]); "
        "assert 'fedquilt' not in sys.modules"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run([*command, path, tmp_path / "x.pt", tmp_path / "y.pt"], check=True)
    assert torch.allclose(torch.load(tmp_path / "y.pt"), expected(small, images), atol=1e-5)


def test_onnx_gives_the_same_answers_on_any_batch(small, images, tmp_path):
    path = export(small, tmp_path / "small.onnx", EXAMPLE)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    assert torch.allclose(torch.from_numpy(answer), expected(small, images), atol=1e-5)


def test_exporting_leaves_the_model_as_it_was(small, tmp_path, capfd):
    small.train()
    export(small, tmp_path / "small.onnx", EXAMPLE)
    assert small.training
    small.eval()
    assert capfd.readouterr().out == ""


class Fickle(nn.Module):
    """Gives another answer each time, so that no file can match it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) + self.calls


def test_a_file_that_does_not_match_is_not_left_behind(tmp_path):
    with pytest.raises(FedquiltError, match="was not written"):
        export(Fickle(), tmp_path / "wrong.safetensors", torch.zeros(1, 4))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["small.h5", "small"])
def test_unknown_endings_are_refused(small, tmp_path, name):
    with pytest.raises(ConfigError, match=r"choose one of: .onnx, .pt2, .safetensors"):
        export(small, tmp_path / name, EXAMPLE)


def test_a_model_without_example_asks_for_one(small, tmp_path):
    with pytest.raises(ConfigError, match="example"):
        export(small, tmp_path / "small.onnx")


def test_a_bundle_comes_back_as_it_was_and_damage_is_seen(tmp_path):
    params = {"w": torch.randn(3, 2), "n": torch.tensor(4)}
    bundle.save(tmp_path, bundle.Bundle(params, {"sizes": [1.0]}))
    found = bundle.load(tmp_path)
    assert found.about["sizes"] == [1.0]
    assert all(torch.equal(found.params[n], t) for n, t in params.items())
    path = tmp_path / "params.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        bundle.load(tmp_path)


def test_a_folder_without_a_model_says_how_to_finish(tmp_path):
    with pytest.raises(CheckpointError, match="train --resume"):
        bundle.load(tmp_path / "model")
