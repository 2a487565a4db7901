"""Losses and batches of any form, and what is refused at the door."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import fedquilt as fq
from fedquilt.errors import ConfigError, DataError
from fedquilt.learning.losses import LOSSES, make_loss

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def start(tmp_path, data=(X, Y), model=None, example=X[:1], **task):
    clients = fq.make_clients(data, test=data, count=2, budgets=(1.0, 0.5))
    out = tmp_path / "run"
    method = task.pop("method", "heterofl")
    return fq.train(model or net(), example, method, clients, rounds=1, workers=0, out=out, **task)


def test_names_are_pytorchs_losses():
    output, targets = X[:, :2], X[:, 2:]
    masks = (targets > 0).float()
    expected = {
        "mse": F.mse_loss(output, targets),
        "mae": F.l1_loss(output, targets),
        "huber": F.huber_loss(output, targets),
        "bce": F.binary_cross_entropy_with_logits(output, masks),
        "poisson": F.poisson_nll_loss(output, masks),
    }
    for name, value in expected.items():
        given = masks if name in ("bce", "poisson") else targets
        assert LOSSES[name].of_output(output, given).equal(value)


def test_dice_is_one_minus_the_overlap_of_soft_masks():
    logits, masks = X[:3].view(3, 2, 2), (X[3:6] > 0).float().view(3, 2, 2)
    parts = []
    for said, mask in zip(logits.sigmoid(), masks, strict=True):
        parts.append(1 - (2 * (said * mask).sum() + 1) / (said.sum() + mask.sum() + 1))
    found = LOSSES["dice"].of_output(logits, masks)
    torch.testing.assert_close(found, torch.stack(parts).mean())


def test_a_column_of_outputs_is_a_row_of_numbers_and_nothing_is_broadcast():
    mse = LOSSES["mse"]
    assert mse.of_output(X[:, :1], Y).equal(F.mse_loss(X[:, 0], Y))
    with pytest.raises(DataError, match=r"one shape, got \(24, 4\) and \(24,\)"):
        mse.of_output(X, Y)


@pytest.mark.parametrize("form", ["mse", nn.MSELoss(), "function", "batch"])
def test_every_form_of_a_loss_gives_the_same_bits(form, tmp_path):
    def function(output, target):
        return F.mse_loss(output, target)

    def batch(model, batch):
        inputs, targets = batch
        return F.mse_loss(model(inputs), targets)

    loss = {"function": function, "batch": batch}.get(form, form) if isinstance(form, str) else form
    run = start(tmp_path, data=(X, Y[:, None]), loss=loss, metrics="mae")
    plain = start(tmp_path / "plain", data=(X, Y[:, None]), loss="mse", metrics="mae")
    for name, tensor in run.state.params.items():
        assert tensor.equal(plain.state.params[name])
    assert [s.value for s in run.scores] == [s.value for s in plain.scores]


class Items(Dataset):
    """Dicts, texts of different lengths."""

    def __len__(self):
        return 12

    def __getitem__(self, row):
        return {"tokens": torch.arange(row % 3 + 2), "age": float(row)}


def pad(items):
    tokens = nn.utils.rnn.pad_sequence([item["tokens"] for item in items], batch_first=True)
    tokens = F.pad(tokens, (0, 4 - tokens.shape[1]))
    return {"tokens": tokens, "age": torch.tensor([item["age"] for item in items])}


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(6, 8), nn.Linear(8, 1)

    def forward(self, tokens):
        return self.out(self.embed(tokens).mean(1))


def test_a_collate_fn_makes_the_batches_and_the_loss_sees_them_as_they_are():
    seen = []

    def loss(model, batch):
        seen.append(sorted(batch))
        return F.mse_loss(model(batch["tokens"])[:, 0], batch["age"])

    clients = fq.make_clients(Items(), count=2, budgets=(1.0, 0.5), collate_fn=pad, target="age")
    example = {"tokens": torch.zeros(1, 4, dtype=torch.int64)}
    torch.manual_seed(0)
    run = fq.train(Texts(), example, "heterofl", clients, rounds=1, workers=0, loss=loss)
    assert {tuple(names) for names in seen} == {("age", "tokens")}
    assert run.setup.task.metric.name == "loss"


def test_a_finished_run_knows_its_task(tmp_path):
    run = start(tmp_path, loss="huber", metrics=["rmse"])
    opened = fq.open_run(tmp_path / "run", net(), "heterofl")
    assert opened.setup.task.describe() == {"loss": "huber", "metrics": ("rmse",)}
    assert opened.scores == run.scores
    start(tmp_path / "own", loss=lambda output, target: (output[:, 0] - target).abs().mean())
    own = fq.open_run(tmp_path / "own" / "run", net(), "heterofl")
    assert own.customize(0.5)(X).shape == (24, 1)
    clients = fq.make_clients((X, Y), test=(X, Y), count=2)
    with pytest.raises(Exception, match=r"open it with fq\.open_run\(\.\.\., loss="):
        own.evaluate(clients, workers=0)


def broken(output, target):
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"loss": "msee"}, r"loss 'msee' is not known \(did you mean 'mse'\?\).*file\.py:function"),
        ({"loss": nn.MSELoss}, "got the class MSELoss"),
        ({"loss": 3}, "a name, or a callable"),
        ({"loss": nn.MSELoss()}, "'MSELoss' cannot be computed .*Using a target size"),
        ({"loss": lambda o, y: (o[:, 0] - y).abs()}, r"one number.* returns a tensor of shape"),
        ({"loss": lambda o, y: o.detach().mean()}, "does not depend on the model's parameters"),
        ({"loss": lambda o, y: 1.0}, "returns a float"),
        ({"loss": broken}, r"the loss 'broken' cannot be computed.*RuntimeError: no"),
        ({"loss": "cross-entropy"}, "int64 class numbers, and the targets are torch.float32"),
        ({"loss": "mse", "metrics": fq.metric(higher_is_better=True)(broken)}, "'broken' failed"),
        ({"loss": "mse", "metrics": ["iou2"]}, "metric 'iou2' is not known"),
        ({"loss": "mse", "method": "fedavg-at"}, "adversarial training needs class numbers"),
        ({"loss": "mse", "method": fq.ADDS(importance="lrp")}, "'lrp' of ADDS needs class numbers"),
        ({"loss": "mse", "cadence": fq.Cadence(test_locally=True)}, "counts right answers"),
    ],
)
def test_what_cannot_be_learned_is_refused_in_a_sentence_and_nothing_is_written(
    task, words, tmp_path
):
    with pytest.raises((ConfigError, DataError), match=words):
        start(tmp_path, **task)
    assert not (tmp_path / "run").exists()


def test_targets_that_do_not_fit_the_loss_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"one shape, got \(2, 1\) and \(2, 2\)"):
        start(tmp_path, data=(X, X[:, :2]), loss="mse")
    with pytest.raises(DataError, match="goes by class numbers, and these targets are none"):
        fq.make_clients((X, Y), count=2, partition="classes:2")


def test_entries_of_a_dict_are_arguments_of_the_model(tmp_path):
    data = ({"tokns": torch.zeros(24, 4, dtype=torch.int64)}, Y)
    example = {"tokens": torch.zeros(1, 4, dtype=torch.int64)}
    with pytest.raises(DataError, match=r"none called 'tokns' \(did you mean 'tokens'\?\)"):
        start(tmp_path, data=data, model=Texts(), example=example, loss="mse")


def test_a_loss_that_is_made_of_other_settings_than_pytorchs_is_its_own():
    assert make_loss(nn.CrossEntropyLoss()) is LOSSES["cross-entropy"]
    smoothed = make_loss(nn.CrossEntropyLoss(label_smoothing=0.1))
    assert smoothed is not LOSSES["cross-entropy"]
    assert not smoothed.has_classes
