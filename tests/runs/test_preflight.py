"""What no round could train is refused before the first one, by name, and leaves nothing behind."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedquilt as fq
from fedquilt.errors import BudgetError, CheckpointError, ConfigError, DataError
from fedquilt.models import MODELS
from fedquilt.runs.preflight import find_method
from fedquilt.settings.load import load_config
from fedquilt.training.initialization import find_given_value

STEPS = fq.LocalTraining(lr=0.05, epochs=1, batch_size=8)


def clients(x=None, y=None, test=None):
    x = torch.randn(24, 5) if x is None else x
    return fq.make_clients((x, torch.arange(24) % 3 if y is None else y), test=test, count=2)


def net(outputs=3):
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, outputs))


class Returning(nn.Module):
    """A net whose forward makes something else of its logits."""

    def __init__(self, change):
        super().__init__()
        self.net, self.change = net(), change

    def forward(self, x):
        return self.change(self.net(x))


def frozen():
    return net().requires_grad_(False)


@pytest.fixture
def start(tmp_path):
    """Starts a run, and sees to it that a refusal leaves no directory."""

    def train(model=None, people=None, method="fedavg", rounds=1, example=None):
        out = tmp_path / "run"
        example = torch.zeros(1, 5) if example is None else example
        try:
            return fq.train(model or net(), example, method, people or clients(), rounds, out=out)
        except fq.FedquiltError:
            assert not out.exists()
            raise

    return train


MODELS_REFUSED = {
    "tuple": (Returning(lambda x: (x, x)), r"returns a tuple of 2; .*output\[0\]"),
    "dict": (Returning(lambda x: {"loss": x, "logits": x}), r"dict with loss, .*\['logits'\]"),
    "number": (Returning(lambda x: x.sum().item()), "returns a float"),
    "no gradient": (Returning(torch.Tensor.detach), "have no gradient; .*detach"),
    "frozen": (frozen(), r"Sequential's all 4 of them are frozen; .*requires_grad_\(True\)"),
    "nothing": (nn.Flatten(), "of Flatten's it has none"),
    "few outputs": (net(2), "labels go up to 2, so there are 3 classes, and the model has 2"),
    "one output": (Returning(lambda x: x[:, 0]), r"returns \(2,\) for labels of shape \(2,\)"),
    "map": (Returning(lambda x: x[..., None]), r"returns \(2, 3, 1\) for labels"),
    "other inputs": (nn.Linear(4, 3), r"Linear cannot be run on .*\(2, 5\).*float32: Runtime"),
}


@pytest.mark.parametrize("case", MODELS_REFUSED)
def test_a_model_that_cannot_be_trained_is_refused_by_name(case, start):
    model, said = MODELS_REFUSED[case]
    with pytest.raises((ConfigError, DataError), match=said):
        start(model)


LABELS = torch.arange(24) % 3
DATA_REFUSED = {
    "float64": ((torch.randn(24, 5).double(),), r"float64 and .*float32; .*\.to\(torch\.float32\)"),
    "integers": ((torch.randint(5, (24, 5)),), r"torch\.int64 and torch\.float32"),
    "shape": ((torch.randn(24, 6),), r"have the shape \(6,\), and the example \(5,\)"),
    "one-hot": ((None, nn.functional.one_hot(LABELS)), r"class numbers with labels\.argmax\(1\)"),
    "from -1": ((None, LABELS - 1), "class numbers from 0, got -1"),
    "test labels": ((None, None, (torch.randn(4, 5), LABELS[:4] + 1)), "labels go up to 3"),
}


@pytest.mark.parametrize("case", DATA_REFUSED)
def test_data_that_do_not_fit_the_model_are_refused_by_name(case, start):
    given, said = DATA_REFUSED[case]
    with pytest.raises(DataError, match=said):
        start(people=clients(*given))


@pytest.mark.parametrize("labels", [torch.eye(3)[LABELS], torch.eye(3)[LABELS].numpy()])
def test_one_hot_floats_are_told_what_to_become(labels, start):
    with pytest.raises(DataError, match=r"int64 class numbers, .*float32.*labels\.argmax\(1\)"):
        start(people=clients(y=labels))


def test_one_hot_items_of_a_dataset_are_told_what_to_become(start):
    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, row):
            return torch.zeros(5), torch.eye(3)[row % 3]

    with pytest.raises(DataError, match=r"int64 class numbers, .*labels\.argmax\(1\)"):
        start(people=fq.make_clients(Pairs(), count=2))
    assert len(fq.make_clients(TensorDataset(torch.zeros(24, 5), LABELS), count=2).clients) == 2


@pytest.mark.parametrize("rounds", [0, -1, 1.5, "3", True, None])
def test_rounds_are_counted(rounds, start):
    with pytest.raises(ConfigError, match=r"rounds: input should be .*, got "):
        start(rounds=rounds)


@pytest.mark.parametrize("name", ["seed", "workers"])
@pytest.mark.parametrize("value", [-1, 1.5, "3", True])
def test_the_seed_and_the_workers_are_numbers(name, value):
    with pytest.raises(ConfigError, match=f"{name}: input should be .*, got "):
        fq.train(net(), torch.zeros(1, 5), "fedavg", clients(), 1, **{name: value})


def test_a_model_is_a_module(start):
    with pytest.raises(ConfigError, match=r"an nn\.Module, got function"):
        start(lambda x: x)


def test_a_model_that_cannot_be_copied_is_refused_with_what_it_holds(start, tmp_path):
    model = net()
    with (tmp_path / "words.txt").open("w") as model.file:
        said = r"Sequential cannot be copied \(TypeError: .*TextIOWrapper.*; let it open files"
        with pytest.raises(ConfigError, match=said):
            start(model)


def test_an_evaluation_is_asked_for_in_numbers_and_clients(start):
    run = start(people=clients(test=(torch.randn(4, 5), LABELS[:4])))
    for widths in ("0.5", (2,), (None,)):
        with pytest.raises(BudgetError, match=r"fractions in \(0, 1\], got "):
            run.evaluate(widths=widths)
    with pytest.raises(ConfigError, match=r"made with fq\.make_clients.*, got tuple"):
        run.evaluate((torch.randn(4, 5), LABELS[:4]))
    with pytest.raises(BudgetError, match=r"fractions in \(0, 1\], got '0.5'"):
        run.customize(width="0.5")


def test_clients_are_made_with_clients(start):
    with pytest.raises(ConfigError, match=r"fq\.make_clients\(data, \.\.\.\), got list"):
        start(people=[TensorDataset(torch.zeros(24, 5), LABELS)])


def test_a_method_may_be_a_name(start):
    assert start(method="heterofl").method == fq.HeteroFL()
    for name, make in fq.METHODS.items():
        assert find_method(name) == make()
    with pytest.raises(ConfigError, match="did you mean 'heterofl'"):
        find_method("heterofI")
    for wrong in (fq.HeteroFL, fq.standalone, None):
        with pytest.raises(ConfigError, match=r"an object such as fq\.HeteroFL\(\), .*got "):
            find_method(wrong)


def test_the_check_leaves_the_model_and_the_random_numbers_as_they_are(start):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.norm = net(), nn.BatchNorm1d(5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.net(self.norm(x)) + 0 * torch.rand(())

    model, people = Counting(), clients(y=torch.arange(24) % 5)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with pytest.raises(DataError, match="labels go up to 4"):
        start(model, people)
    assert torch.equal(torch.rand(3), expected)
    assert model.calls == 0
    assert model.training
    assert all(module.training for module in model.modules())


SMALL = ("mlp", "heterofl-cnn", "digits-cnn", "resnet20", "mobilenetv2", "adds-mobilenet")


@pytest.mark.parametrize("name", [*SMALL, "char-lstm", "vit-small", "heterofl-transformer"])
def test_fresh_models_look_fresh(name):
    torch.manual_seed(5)
    assert find_given_value(MODELS[name]()) is None


def nudged(model):
    """Trained a little: values move by less than a third of their spread."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter) * parameter.std()
    return model


@pytest.mark.parametrize("name", SMALL)
def test_models_with_other_values_do_not(name):
    assert find_given_value(nudged(MODELS[name]())) is not None


def test_split_mix_says_that_it_does_not_use_the_models_values(start):
    method = fq.SplitMix(STEPS, base=0.5)
    start(method=method)  # without a word
    model = net()
    nn.init.constant_(model[0].weight, 0.5)
    with pytest.warns(
        UserWarning, match=r"SplitMix draws .*'0\.weight' has others.*HeteroFL"
    ) as said:
        fq.train(model, torch.zeros(1, 5), method, clients(), 1)
    assert said[0].filename == __file__  # where the model was given


def test_a_run_is_resumed_from_a_directory_and_kept_in_one(tmp_path):
    with pytest.raises(ConfigError, match=r"resumed from its directory.*give out="):
        fq.train(net(), torch.zeros(1, 5), "fedavg", clients(), 1, resume=True)
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(CheckpointError, match="is a file, and a run needs a directory"):
        fq.train(net(), torch.zeros(1, 5), "fedavg", clients(), 1, out=file)
    assert file.read_text() == "mine"
    with pytest.raises(CheckpointError, match="does not exist"):
        fq.open_run(tmp_path / "nowhere", net(), "fedavg")


def test_one_width_is_as_good_as_several_and_one_that_nobody_trained_is_said(start):
    run = start(people=clients(test=(torch.randn(9, 5), torch.arange(9) % 3)))
    (score,) = run.evaluate(widths=1.0, workers=0)
    assert score.width == 1
    with pytest.warns(UserWarning, match=r"no client trained a model of size 0\.5.* trained is 1"):
        run.customize(width=0.5)


ARGUMENTS_REFUSED = {
    "callbacks": (print, r"callbacks is a list of callables, such as \[print\]"),
    "engine": ("flower", "engine is a function that makes an engine, got 'flower'"),
    "exclude": ("2", r"exclude is a tuple of names, got '2'; write \('2',\)"),
    "clients": ([], r"fq\.make_clients\(data, \.\.\.\), got list"),
}


@pytest.mark.parametrize("name", ARGUMENTS_REFUSED)
def test_an_argument_of_another_kind_is_refused_by_name(name):
    value, said = ARGUMENTS_REFUSED[name]
    arguments = {"clients": clients(), "workers": 0, name: value}
    with pytest.raises(fq.FedquiltError, match=said):
        fq.train(net(), torch.zeros(1, 5), "fedavg", rounds=1, **arguments)


def test_names_of_methods_may_be_written_in_any_case():
    assert find_method("HeteroFL") == find_method("heterofl")
    assert load_config({"method": {"name": "SplitMix"}}) == load_config(
        {"method": {"name": "splitmix"}}
    )
