"""Small comparisons: a perceptron on a few digits."""

import pytest

from fedquilt.comparison.from_settings import compare_settings
from fedquilt.comparison.progress import TrialDone, TrialFailed, TrialsQueued

SETTINGS = {
    "rounds": 2,
    "data": {"source": "digits", "fraction": 0.2, "clients": 4, "budgets": [1.0, 0.5]},
    "model": {"name": "mlp", "hidden": [8]},
    "local_training": {"epochs": 1, "batch_size": 20, "lr": 0.1},
    "compare": {"methods": ["heterofl", "fjord"], "seeds": 2},
}


class Log:
    """The events of a comparison."""

    def __init__(self):
        self.events = []

    def __call__(self, event):
        self.events.append(event)

    @property
    def done(self):
        return [(e.trial.variant, e.trial.seed) for e in self.events if isinstance(e, TrialDone)]

    @property
    def failed(self):
        return [e for e in self.events if isinstance(e, TrialFailed)]

    @property
    def reused(self):
        return sum(e.num_done for e in self.events if isinstance(e, TrialsQueued))


def merged(**changes):
    """The small settings with others; sections are merged."""
    settings = {k: dict(v) if isinstance(v, dict) else v for k, v in SETTINGS.items()}
    for name, value in changes.items():
        is_section = isinstance(value, dict) and name in settings
        settings[name] = {**settings[name], **value} if is_section else value
    return settings


def run(out, workers=0, **changes):
    """A small comparison and its log."""
    log = Log()
    return compare_settings(merged(**changes), out, workers=workers, on_event=log), log


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A finished comparison: the table, the log, and the folder."""
    folder = tmp_path_factory.mktemp("small")
    table, log = run(folder)
    return table, log, folder
