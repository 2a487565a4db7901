"""How do I take a small model away, and use it where Fedquilt is not installed?

The files are read with plain PyTorch and with ONNX Runtime; neither knows anything of Fedquilt.
"""

import tempfile
from pathlib import Path

import onnxruntime
import torch
from safetensors.torch import load_file

import fedquilt as fq
from fedquilt.data import load_dataset
from fedquilt.models import make_model


def main(folder: Path) -> None:
    digits = load_dataset("digits")
    run = fq.train(
        model=make_model("heterofl-cnn", {"width": 0.25}),
        example=torch.zeros(1, 1, 8, 8),
        method=fq.HeteroFL(fq.LocalTraining(epochs=1), fraction=1.0),
        clients=fq.make_clients(digits.train, test=digits.test, count=5, budgets=[1, 0.5]),
        rounds=3,
        workers=0,
    )
    small = run.customize(width=0.5)
    images, _ = digits.test.batch(torch.arange(4))
    expected = small(images)
    for name in ("small.pt2", "small.onnx", "small.safetensors"):
        fq.export(small, folder / name)

    program = torch.export.load(folder / "small.pt2").module()
    torch.testing.assert_close(program(images), expected)

    session = onnxruntime.InferenceSession(folder / "small.onnx")
    (name,) = (given.name for given in session.get_inputs())
    (found,) = session.run(None, {name: images.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)

    plain = make_model("heterofl-cnn", {"width": 0.125}).eval()  # half of a quarter: your own class
    plain.load_state_dict(load_file(folder / "small.safetensors"))
    torch.testing.assert_close(plain(images), expected)
    print("three files, one model:", expected.argmax(1).tolist())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
