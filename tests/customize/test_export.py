import copy
import json
import subprocess
import sys

import onnxruntime
import pytest
import torch
from safetensors import safe_open
from torch import nn

from fedquilt.customize.export import export
from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.structure.create import trace_structure
from fedquilt.structure.cut import build_module

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
    structure = trace_structure(net, EXAMPLE)
    return build_module(net, structure, structure.subnet(0.5)).eval()


@pytest.fixture(scope="module")
def pictures():
    return torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def expected(model, pictures):
    with torch.no_grad():
        return model(pictures)


def test_safetensors_hold_the_weights_and_what_they_are(small, pictures, tmp_path):
    path = export(small, tmp_path / "small.safetensors", EXAMPLE, {"width": 0.5})
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["fedquilt"]) == {"width": 0.5}
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert torch.equal(
        torch.func.functional_call(small, values, pictures), expected(small, pictures)
    )


def test_pt2_runs_without_fedquilt_on_any_batch(small, pictures, tmp_path):
    path = export(small, tmp_path / "small.pt2", EXAMPLE)
    torch.save(pictures, tmp_path / "x.pt")
    code = (
        "import sys, torch; m = torch.export.load(sys.argv[1]).module(); "
        "torch.save(m(torch.load(sys.argv[2])).detach(), sys.argv[3]); "
        "assert 'fedquilt' not in sys.modules"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run([*command, path, tmp_path / "x.pt", tmp_path / "y.pt"], check=True)
    assert torch.allclose(torch.load(tmp_path / "y.pt"), expected(small, pictures), atol=1e-5)


def test_onnx_gives_the_same_answers_on_any_batch(small, pictures, tmp_path):
    path = export(small, tmp_path / "small.onnx", EXAMPLE)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {session.get_inputs()[0].name: pictures.numpy()})
    assert torch.allclose(torch.from_numpy(answer), expected(small, pictures), atol=1e-5)


def test_exporting_leaves_the_model_as_it_was(small, tmp_path, capfd):
    small.train()
    export(small, tmp_path / "small.onnx", EXAMPLE)
    assert small.training
    small.eval()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("ending", ["onnx", "pt2", "safetensors"])
def test_a_module_with_two_names_is_written_and_left_as_it_is(tmp_path, ending):
    common = nn.Linear(4, 4)
    net = nn.Sequential(common, nn.Tanh(), nn.Sequential(common), nn.Linear(4, 2)).eval()
    weight = common.weight
    export(net, tmp_path / f"net.{ending}", torch.zeros(2, 4))  # read back and compared
    assert common.weight is weight
    if ending == "safetensors":
        with safe_open(tmp_path / "net.safetensors", framework="pt") as file:
            assert set(file.keys()) == {"0.weight", "0.bias", "3.weight", "3.bias"}


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


class OneByOne(nn.Module):
    """Looks at examples in a loop, which no exporter can follow for another number of them."""

    def forward(self, x):
        return torch.stack([row * 2 for row in x])


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_a_model_for_one_number_of_examples_is_refused(tmp_path, ending):
    with pytest.raises(FedquiltError, match="cannot be exported for any number of examples"):
        export(OneByOne(), tmp_path / f"loop.{ending}", torch.zeros(1, 6))
    assert list(tmp_path.iterdir()) == []


# mixtures and families


def session_of(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def answers(session, *inputs):
    names = [i.name for i in session.get_inputs()]
    feed = {n: x.numpy() for n, x in zip(names, inputs, strict=True)}
    return torch.from_numpy(session.run(None, feed)[0])


def close(one, other):
    return torch.allclose(one, other, atol=1e-4 * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("ending", ["onnx", "pt2", "safetensors"])
def test_a_point_of_a_mixture_is_written_as_it_answers(robust, images, tmp_path, ending):
    model = robust.open().customize(0.75)
    with model.at_setting(width=0.5, robustness=0.3):
        path = export(model, tmp_path / f"point.{ending}", about={"width": 0.5})
        wanted = expected(model, images)
    if ending == "onnx":
        session = session_of(path)
        assert [i.name for i in session.get_inputs()] == ["x"]  # as the net calls it
        assert [o.name for o in session.get_outputs()] == ["logits"]
        assert json.loads(session.get_modelmeta().custom_metadata_map["fedquilt"])["width"] == 0.5
        found = answers(session, images)
    elif ending == "pt2":
        found = torch.export.load(path).module()(images)
    else:
        other = robust.open().customize(0.75, 0.3)
        other.width = 0.5
        with safe_open(path, framework="pt") as file:
            other.load_state_dict({n: file.get_tensor(n) for n in file.keys()})  # noqa: SIM118
        found = expected(other, images)
    assert close(found, wanted)


@pytest.mark.parametrize("name", ["robust", "robust batch"])
def test_a_family_answers_as_the_model_at_every_width_and_robustness(
    stored, images, tmp_path, name
):
    model = stored(name).open().customize(0.75)
    model.width, model.robustness = 0.75, 0.6
    session = session_of(export(model, tmp_path / "family.onnx", family=True))
    assert (model.width, model.robustness) == (0.75, 0.6)
    image, dial = session.get_inputs()
    (logits,) = session.get_outputs()
    assert (image.name, dial.name, logits.name) == ("x", "robustness", "logits_by_width")
    assert dial.shape == []
    for robustness in (0.0, 0.3, 1.0):
        for some in (images, images[:2]):  # any number of examples
            found = answers(session, some, torch.tensor(robustness))
            assert found.shape == (3, len(some), 3)
            for row, width in zip(found, (0.25, 0.5, 0.75), strict=True):
                with model.at_setting(width=width, robustness=robustness):
                    assert close(row, expected(model, some))
    with model.at_setting(robustness=0.0):
        assert not close(found[-1], expected(model, some))  # the dial does something


def test_a_family_without_a_dial_has_the_widths(stored, images, tmp_path):
    model = stored("batch").open().customize(0.5)
    session = session_of(export(model, tmp_path / "family.onnx", family=True))
    found = answers(session, images)
    assert close(found, expected(model.predict_all_widths, images))
    assert close(found[-1], expected(model, images))


def test_a_family_of_one_net_has_one_row(stored, images, tmp_path):
    run = stored("oat").open()
    program = torch.export.load(export(run.customize(), tmp_path / "family.pt2", family=True))
    for robustness in (0.0, 0.3, 1.0):
        found = program.module()(images, torch.tensor(robustness))
        assert found.shape == (1, 5, 3)
        assert close(found[0], expected(run.customize(robustness=robustness), images))


def test_what_has_no_family_is_refused(robust, small, tmp_path):
    with pytest.raises(ConfigError, match="several widths or a robustness dial"):
        export(small, tmp_path / "family.onnx", EXAMPLE, family=True)
    with pytest.raises(ConfigError, match=r"write it to .onnx or .pt2"):
        export(robust.open().customize(), tmp_path / "family.safetensors", family=True)
    assert list(tmp_path.iterdir()) == []


class Hiding(nn.Module):
    """Draws in use too."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x.masked_fill(torch.rand(x.shape) < 0.5, 0.0))


@pytest.mark.parametrize("ending", ["safetensors", "pt2"])
def test_a_net_that_draws_in_use_is_compared_on_the_same_draws(tmp_path, ending):
    state = torch.get_rng_state()
    net = Hiding().eval()
    torch.set_rng_state(state)
    assert export(net, tmp_path / f"a.{ending}", torch.zeros(2, 4)).is_file()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ending", ["safetensors", "pt2"])
def test_weights_of_other_precisions_are_exported_as_they_are(small, tmp_path, dtype, ending):
    other = copy.deepcopy(small).to(dtype)
    path = export(other, tmp_path / f"other.{ending}", EXAMPLE.to(dtype))
    if ending == "safetensors":
        with safe_open(path, framework="pt") as file:
            assert file.get_tensor("0.weight").dtype == dtype
    else:
        assert torch.export.load(path).module()(EXAMPLE.to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_precision_that_onnxruntime_cannot_read_back_is_refused(small, tmp_path, dtype):
    other, path = copy.deepcopy(small).to(dtype), tmp_path / "other.onnx"
    with pytest.raises(FedquiltError, match=rf"weights of {dtype}: export a copy in .float\(\)$"):
        export(other, path, EXAMPLE.to(dtype))
    assert list(tmp_path.iterdir()) == []


def test_half_precision_goes_to_onnx(small, tmp_path):
    path = export(copy.deepcopy(small).half(), tmp_path / "half.onnx", EXAMPLE.half())
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].type == "tensor(float16)"


class Padded(nn.Module):
    """PyTorch's own encoder, which in use takes a fast path around padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.embed, self.encoder = nn.Embedding(10, 8), nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.encoder(self.embed(x), src_key_padding_mask=x == 0).mean(1))


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_pytorchs_own_encoder_is_exported_without_its_fast_path(tmp_path, ending):
    torch.manual_seed(0)
    net = Padded().eval()
    tokens = torch.tensor([[3, 1, 4, 0, 0], [2, 6, 5, 3, 5]])
    path = export(net, tmp_path / f"encoder.{ending}", tokens)
    assert torch.backends.mha.get_fastpath_enabled()
    if ending == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (answer,) = session.run(None, {session.get_inputs()[0].name: tokens.numpy()})
    else:
        answer = torch.export.load(path).module()(tokens).detach()
    slow = net(tokens).detach()  # with gradients there is no other path
    torch.testing.assert_close(torch.as_tensor(answer), slow, atol=1e-5, rtol=1e-4)
