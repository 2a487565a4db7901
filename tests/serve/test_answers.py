"""What the server answers is what the run's own models say, at every point of the dials."""

import io
import json

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import fedquilt as fq
from fedquilt.customize.info import InputSpec
from fedquilt.data.text import CharacterEncoder, encode_characters
from fedquilt.serve import Limits, ServedModel
from fedquilt.serve.preprocess import InputReader
from fedquilt.serve.tasks import TaskInfo
from fedquilt.serve.wish import Wish

CLIENT = httpx.Client(timeout=30)


@pytest.fixture(scope="session", autouse=True)
def _close_client():
    yield
    CLIENT.close()


def ask(address, body, kind="application/json", **query):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": kind}
    return CLIENT.post(f"{address}predict", params=query, content=data, headers=headers)


def probabilities(reply):
    assert reply.status_code == 200, reply.text
    return torch.tensor([p["probabilities"] for p in reply.json()["predictions"]])


@pytest.fixture(scope="module")
def inputs(digits):
    return digits.test.batch(torch.arange(4))[0]


@torch.no_grad()
def expect(run, inputs, *point):
    return run.customize(*point)(inputs).softmax(-1)


@pytest.mark.parametrize("size", [1.0, 0.5, 0.25])
def test_answers_are_those_of_the_size_that_was_asked_for(narrow, narrow_run, inputs, size):
    reply = ask(narrow, {"inputs": inputs.tolist()}, size=size)
    torch.testing.assert_close(probabilities(reply), expect(narrow_run, inputs, size))
    answer = reply.json()
    assert answer["size"] == size
    cost = {s.width: (s.params, s.macs) for s in narrow_run.scores}[size]
    assert (answer["params"], answer["macs"]) == cost
    for prediction, row in zip(answer["predictions"], probabilities(reply), strict=True):
        assert prediction["label"] == row.argmax()
        assert prediction["confidence"] == pytest.approx(row.max().item())


@pytest.mark.parametrize("point", [(1.0, 0.0), (0.5, 0.3), (0.25, 1.0)])
def test_both_dials_of_an_ensemble_are_those_of_customize(robust, robust_run, inputs, point):
    reply = ask(robust, {"inputs": inputs.tolist()}, size=point[0], robustness=point[1])
    torch.testing.assert_close(probabilities(reply), expect(robust_run, inputs, *point))
    assert reply.json()["robustness"] == point[1]


def test_the_robustness_changes_answers_and_is_forgotten_after_the_request(robust, inputs):
    body = {"inputs": inputs.tolist()}
    before = probabilities(ask(robust, body))
    assert not torch.allclose(probabilities(ask(robust, body, robustness=1)), before, atol=1e-3)
    assert torch.equal(probabilities(ask(robust, body)), before)


def test_images_arrays_and_pixels_are_preprocessed_as_in_training(narrow, digits):
    raw = digits.test.inputs[:3]
    assert raw.dtype == torch.uint8
    inputs = digits.test.batch(torch.arange(3))[0]
    expected = probabilities(ask(narrow, {"inputs": inputs.tolist()}))
    from_pixels = probabilities(ask(narrow, {"pixels": raw.tolist()}))
    file = io.BytesIO()
    np.save(file, raw.numpy())
    from_npy = probabilities(ask(narrow, file.getvalue(), "application/x-npy"))
    png = io.BytesIO()
    Image.fromarray(raw[0, 0].numpy()).save(png, "PNG")
    from_png = probabilities(ask(narrow, png.getvalue(), "image/png"))
    torch.testing.assert_close(from_pixels, expected)
    torch.testing.assert_close(from_npy, expected)
    torch.testing.assert_close(from_png, expected[:1])


def test_one_example_needs_no_batch_axis_and_floats_in_npy_are_as_the_model_takes_them(
    narrow, inputs
):
    file = io.BytesIO()
    np.save(file, inputs[0].double().numpy())
    alone = probabilities(ask(narrow, {"inputs": inputs[0].tolist()}))
    assert alone.shape == (1, 10)
    as_file = probabilities(ask(narrow, file.getvalue(), "application/octet-stream"))
    torch.testing.assert_close(as_file, alone)


def test_an_image_of_another_size_and_color_is_converted(narrow):
    large = io.BytesIO()
    Image.new("RGBA", (40, 30), (200, 10, 10, 255)).save(large, "PNG")
    assert probabilities(ask(narrow, large.getvalue(), "image/png")).shape == (1, 10)


def test_texts_become_the_tokens_that_the_data_have():
    encoder = CharacterEncoder(length=4)
    reader = InputReader((InputSpec((1, 4), "int64"),), encoder=encoder)
    assert reader.kind == "text"
    expected = encode_characters("king").long()
    for body, kind in ((b'{"text": "a king"}', "application/json"), (b"a king", "text/plain")):
        (tokens,) = reader.read(body, kind, Limits())
        assert torch.equal(tokens, expected[None])
    (several,) = reader.read(b'{"text": ["a king", "king"]}', "application/json", Limits())
    assert torch.equal(several, expected.expand(2, 4))
    with pytest.raises(fq.FedquiltError, match="takes text, not pixels"):
        reader.read(b'{"pixels": [[1]]}', "application/json", Limits())


def test_models_with_several_inputs_take_one_array_each():
    specs = (InputSpec((1, 2), "float32"), InputSpec((1,), "int64"))
    reader = InputReader(specs)
    first, second = reader.read(b'{"inputs": [[[1, 2]], [3]]}', "application/json", Limits())
    assert first.tolist() == [[1, 2]]
    assert second.tolist() == [3]
    for body in (b'{"inputs": [[[1, 2]]]}', b'{"inputs": [[[1, 2]], [3, 4]]}'):
        with pytest.raises(fq.FedquiltError, match=r"one array each|same number"):
            reader.read(body, "application/json", Limits())


def test_raw_outputs_are_given_where_the_task_has_no_classes():
    outputs = torch.tensor([[0.5, -2.0]])
    assert TaskInfo("regression", (2,)).answer(outputs) == [{"output": [0.5, -2.0]}]
    (by_position,) = TaskInfo("classification", (2, 3)).answer(torch.eye(3)[None, 1:])
    assert by_position["label"] == [1, 2]
    mask = torch.zeros(1, 3, 2, 2)
    mask[0, 2] = 1.0
    (by_pixel,) = TaskInfo("classification", (3, 2, 2)).answer(mask)
    assert by_pixel["label"] == [[2, 2], [2, 2]]
    (yes,) = TaskInfo("bce", (2,)).answer(torch.tensor([[0.0, 50.0]]))
    assert yes["probability"] == pytest.approx([0.5, 1.0])
    (many,) = TaskInfo("classification", (200,)).answer(torch.arange(200.0)[None])
    assert [label for label, _ in many["top"]] == list(range(199, 189, -1))


def test_a_regression_answers_with_what_its_model_says(serve):
    x = torch.linspace(-1, 1, 24).view(12, 2)
    clients = fq.make_clients((x, x.sum(1, keepdim=True)), count=2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    run = fq.train(model, x[:1], "fedavg", clients, 1, loss="mse", workers=0)
    answer = ask(serve(run), {"inputs": x[:3].tolist()}).json()
    assert answer["task"] == "mse"
    with torch.no_grad():
        expected = run.customize()(x[:3])
    told = torch.tensor([p["output"] for p in answer["predictions"]])
    torch.testing.assert_close(told, expected)


def test_limits_choose_the_largest_size_within_all_of_them(narrow_run):
    model = ServedModel.from_run(narrow_run)
    full, half, quarter = model.sizes
    assert model.choose(Wish()) is full
    assert model.choose(Wish(size=0.7)) is half
    assert model.choose(Wish(params=full.params - 1)) is half
    assert model.choose(Wish(macs=half.macs, size=0.3)) is quarter
    slow = max(model.sizes, key=lambda sized: sized.milliseconds).milliseconds
    assert model.choose(Wish(latency=slow)) is full
    fastest = min(sized.milliseconds for sized in model.sizes)
    with pytest.raises(fq.FedquiltError, match=r"no size meets .* the smallest is 0\.25"):
        model.choose(Wish(latency=fastest / 2))


def test_other_sizes_can_be_offered_and_say_that_they_were_not_trained(narrow_run):
    model = ServedModel.from_run(narrow_run, sizes=(0.75, 0.1))
    assert [(s.size, s.is_trained) for s in model.sizes] == [(0.75, False), (0.1, False)]
    assert any("no client trained" in text for text in model.warnings)


def test_classes_have_the_names_that_were_given(serve, narrow_run, inputs):
    names = ("nought", *"abcdefghi")
    address = serve(narrow_run, labels=names)
    prediction = ask(address, {"inputs": inputs[0].tolist()}).json()["predictions"][0]
    assert prediction["name"] == names[prediction["label"]]


def test_the_model_page_says_what_the_run_says(narrow, narrow_run):
    facts = CLIENT.get(f"{narrow}model").json()
    assert [(s["size"], s["params"], s["macs"]) for s in facts["sizes"]] == [
        (s.width, s.params, s.macs) for s in narrow_run.scores
    ]
    assert all(s["ms"] > 0 for s in facts["sizes"])
    assert facts["input"]["kind"] == "image"
    assert facts["shapes"] == [[1, 8, 8]]
    assert CLIENT.get(f"{narrow}health").json() == {"status": "ok"}


def test_the_openapi_document_names_every_parameter_and_type_that_is_taken(robust, narrow):
    document = CLIENT.get(f"{robust}openapi.json").json()
    predict = document["paths"]["/predict"]["post"]
    assert {p["name"] for p in predict["parameters"]} == set(Wish.model_fields)
    for kind in predict["requestBody"]["content"]:
        assert ask(robust, b"", kind).status_code != 415
    assert ask(robust, b"", "text/html").status_code == 415
    plain = CLIENT.get(f"{narrow}openapi.json").json()["paths"]["/predict"]["post"]["parameters"]
    assert "robustness" not in {p["name"] for p in plain}  # it has no such dial
    page = CLIENT.get(f"{robust}docs").text
    assert all(f"<code>{p['name']}</code>" in page for p in predict["parameters"])
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page  # nothing from other hosts
