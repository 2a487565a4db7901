"""A model of text from its training to the answer of a server."""

import json

import httpx
import pytest
import torch

from fedquilt.cli import main
from fedquilt.data.text import ALPHABET, encode_characters
from fedquilt.runs.from_config import open_configured_run

VERSE = "to be or not to be that is the question whether tis nobler in the mind to suffer "
LENGTH = 8
OPTIONS = (
    "--model char-lstm --partition natural --budgets 1,0.5 --rounds 1 --workers 0 "
    "--set model.embedding=4 --set model.hidden=6 --set model.head=8 "
    "--set local_training.epochs=1 --method heterofl"
)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """A next-character model, trained by the command on files of LEAF."""
    folder = tmp_path_factory.mktemp("text")
    texts = [VERSE[i : i + LENGTH] for i in range(40)]
    own = {"x": texts, "y": [VERSE[i + LENGTH] for i in range(40)]}
    for part in ("train", "test"):
        (folder / "verses" / part).mkdir(parents=True)
        document = {"users": ["a", "b"], "num_samples": [40, 40], "user_data": {"a": own, "b": own}}
        (folder / "verses" / part / "all.json").write_text(json.dumps(document))
    with pytest.raises(SystemExit, match="0"):
        main(f"train --data {folder / 'verses'} --out {folder / 'run'} {OPTIONS}".split())
    return open_configured_run(folder / "run")


@pytest.mark.parametrize("size", [1.0, 0.5])
def test_a_text_is_answered_with_the_next_character_of_the_size_that_was_asked(
    serve, text_run, size
):
    address = serve(text_run)
    text = "to be or"
    with torch.no_grad():
        expected = text_run.customize(size)(encode_characters(text).long()[None]).softmax(-1)[0]
    bodies = ((json.dumps({"text": text}), "application/json"), (text, "text/plain"))
    for body, kind in bodies:
        reply = httpx.post(
            f"{address}predict",
            params={"size": size},
            content=body.encode(),
            headers={"content-type": kind},
            timeout=30,
        )
        assert reply.status_code == 200, reply.text
        (prediction,) = reply.json()["predictions"]
        torch.testing.assert_close(torch.tensor(prediction["probabilities"]), expected)
        assert prediction["label"] == expected.argmax()
        assert prediction["name"] == ALPHABET[expected.argmax()]
    assert "text" in httpx.get(str(address), timeout=30).text
