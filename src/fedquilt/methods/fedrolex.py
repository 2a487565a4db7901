"""FedRolex: clients train a window of the channels, which rolls over the model from round to round.

Alam, Liu, Yan, Zhang. "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction." NeurIPS 2022. All cells are trained alike, so that the model may be larger than any
client can afford.

It is federated dropout whose order of channels is not drawn: a window of ⌈width · C⌉ channels
starts at (round mod C), and goes round the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedquilt.federation.client import Client
from fedquilt.federation.state import Setup
from fedquilt.methods.feddrop import FedDrop
from fedquilt.structure.groups import Group
from fedquilt.training.settings import LocalTraining


@dataclass(frozen=True)
class FedRolex(FedDrop):
    """A window as wide as a client's budget allows; loss and rows of a client's own classes.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.FedRolex()
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> [record.bytes_sent for record in run.client_records[0]]  # a window by budget
    [268, 268, 140, 140]
    """

    local_training: LocalTraining = field(
        default_factory=lambda: LocalTraining(weight_decay=1e-3, epochs=1, batch_size=10)
    )
    width: float = 1.0
    scaler: bool = False
    masked: bool = True
    own_rows: bool = True

    def order(
        self, setup: Setup, round: int, client: Client, group: Group
    ) -> npt.NDArray[np.int64]:
        """i, i + 1, … (mod C), where i is the round."""
        return (np.arange(group.size) + round) % group.size
