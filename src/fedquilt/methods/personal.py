"""Baselines with personal models: Standalone and LG-FedAvg.

Both are FedAvg in which some tensors never leave the client. In Standalone none does. In LG-FedAvg
(Liang et al., "Think Locally, Act Globally", 2020) clients keep their own representation layers
and share the layers above.
"""

from __future__ import annotations

from fedquilt.federation.aggregation import TAKE_MEAN, ServerOptimizer
from fedquilt.methods.fedavg import FedAvg
from fedquilt.structure.structure import OUTPUTS
from fedquilt.training.settings import LocalTraining


def standalone(
    local_training: LocalTraining | None = None,
    fraction: float = 1.0,
    width: float = 1.0,
    within_budgets: bool = False,
) -> FedAvg:
    """Every client trains alone.

    Args:
        local_training: Settings of local training; None: the defaults.
        fraction: Fraction of the clients that take part in a round.
        width: Width of the net that every client trains.
        within_budgets: Whether the width is at most what all clients can afford.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.standalone()
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> [record.bytes_sent for record in run.client_records[0]]  # nothing leaves a client
    [0, 0, 0, 0]
    """
    local_training = local_training or LocalTraining(max_grad_norm=None)
    return FedAvg(
        local_training, fraction, width, local_params=("*",), within_budgets=within_budgets
    )


def lg_fedavg(
    local_training: LocalTraining | None = None,
    fraction: float | None = None,
    width: float = 1.0,
    shared: tuple[str, ...] = (OUTPUTS,),
    within_budgets: bool = False,
    server_optimizer: ServerOptimizer = TAKE_MEAN,
) -> FedAvg:
    """Clients share the tensors that match ``shared`` (the output layer), and keep all others.

    Args:
        local_training: Settings of local training; None: the defaults.
        fraction: Fraction of the clients that take part in a round.
        width: Width of the net that every client trains.
        shared: Patterns of tensors that are averaged; all others stay on their clients.
        within_budgets: Whether the width is at most what all clients can afford.
        server_optimizer: What the server makes of the mean; by default it takes the mean itself.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.lg_fedavg(shared=("1.*",))
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> [record.bytes_sent for record in run.client_records[0]]  # the last layer
    [108, 108, 108, 108]
    """
    home = ("*", *(f"!{pattern}" for pattern in shared))
    local_training = local_training or LocalTraining(max_grad_norm=None)
    return FedAvg(
        local_training,
        fraction,
        width,
        local_params=home,
        within_budgets=within_budgets,
        server_optimizer=server_optimizer,
    )
