"""Which test examples a finished model answers rightly, one by one: for paired tests."""

from __future__ import annotations

import numpy as np
import torch

from fedquilt.comparison.significance import pack_outcomes
from fedquilt.errors import FedquiltError
from fedquilt.federation.client import SERVER
from fedquilt.runs.run import Run

BATCH = 500
MAX_EXAMPLES = 50_000  # of which more would not make a test sharper


def record_outcomes(run: Run, sizes: set[float]) -> dict[str, str]:
    """Outcomes on the server's test data, by size.

    Sizes whose mean outcome is not the accuracy that the run recorded are left out: there each
    client answers with a model of its own, or batches are normalized by themselves.
    """
    data = None if run.population is None else run.population.test.get(SERVER)
    if data is None or not 0 < len(data) <= MAX_EXAMPLES or not run.setup.task.counts_hits:
        return {}
    if data.labels is None or data.labels.ndim != 1:
        return {}
    recorded = {score.width: score.accuracy for score in run.scores}
    outcomes = {}
    for size in sorted(sizes):
        try:
            module = run.customize(size).eval()
        except FedquiltError:
            continue
        right = []
        with torch.no_grad():
            for rows in torch.arange(len(data)).split(BATCH):
                inputs, labels = data.batch(rows)
                right.append(module(inputs).argmax(-1) == labels)
        flags = torch.cat(right).numpy()
        accuracy = recorded.get(size)
        if accuracy is not None and np.isclose(flags.mean(), accuracy, atol=1e-9):
            outcomes[f"{size:g}"] = pack_outcomes(flags)
    return outcomes
