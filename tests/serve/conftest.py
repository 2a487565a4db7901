from contextlib import ExitStack

import pytest
import torch

import fedquilt as fq
from fedquilt.cli import main
from fedquilt.runs.from_config import open_configured_run
from fedquilt.serve import Limits, ServedModel, create_app
from fedquilt.web.access import Access
from fedquilt.web.listen import run_in_background

OPTIONS = (
    "--model mlp --budgets 1,0.5,0.25 --clients 3 --rounds 2 --workers 0 --set model.hidden=[16] "
    "--set local_training.epochs=1 --set local_training.lr=0.05"
)
LOCAL = Access("127.0.0.1", None)


@pytest.fixture(scope="session")
def digits():
    return fq.load_dataset("digits")


@pytest.fixture(scope="session")
def narrow_run(digits, tmp_path_factory):
    """HeteroFL: every size has a module of its own."""
    folder = tmp_path_factory.mktemp("secret-place") / "narrow"
    with pytest.raises(SystemExit, match="0"):
        main(f"train --out {folder} {OPTIONS}".split())
    return open_configured_run(folder)


class Net(torch.nn.Module):
    """A convolution with normalization, for Split-Mix's two dials."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(8, 10)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.fixture(scope="session")
def robust_run(digits):
    """Split-Mix: an ensemble with two dials."""
    part = digits.train.select(torch.arange(160))
    clients = fq.make_clients(part, test=digits.test, count=2, budgets=(1.0, 0.5))
    local = fq.LocalTraining(epochs=4, lr=0.3, batch_size=32)
    method = fq.SplitMix(local, base=0.25, robust=True, epsilon=1.0, steps=1)
    torch.manual_seed(0)
    return fq.train(Net(), digits.example, method, clients, 2, workers=0)


@pytest.fixture(scope="session")
def serve():
    """Starts servers that last as long as the tests."""
    with ExitStack() as stack:

        def start(run, limits=None, access=LOCAL, **more):
            app = create_app(ServedModel.from_run(run, **more), limits or Limits())
            return stack.enter_context(run_in_background(app, access))

        yield start


@pytest.fixture(scope="session")
def narrow(serve, narrow_run):
    return serve(narrow_run)


@pytest.fixture(scope="session")
def robust(serve, robust_run):
    return serve(robust_run)
