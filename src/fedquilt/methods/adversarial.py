"""Federated adversarial training: the baselines of Split-Mix's robustness.

FedAvg+AT trains one net for one trade-off λ_n between clean and attacked inputs (Eq. 1 of Hong et
al., ICLR 2022). FedAvg+OAT trains one net whose layers are conditioned on λ (Wang et al.,
"Once-for-All Adversarial Training", NeurIPS 2020).
"""

from __future__ import annotations

from typing import Literal

from fedquilt.federation.aggregation import TAKE_MEAN, ServerOptimizer
from fedquilt.methods.fedavg import FedAvg
from fedquilt.training.attack import PGD
from fedquilt.training.client_loss import Masked
from fedquilt.training.objectives import Adversarial, OnceForAll
from fedquilt.training.settings import LocalTraining

LOCAL_TRAINING = LocalTraining(
    epochs=1, max_grad_norm=None
)  # one epoch a round, as Hong et al. on Digits


def fedavg_at(
    local_training: LocalTraining | None = None,
    fraction: float = 1.0,
    width: float = 1.0,
    share: float = 0.5,
    epsilon: float = 8 / 255,
    steps: int = 7,
    step_size: float | None = None,
    statistics: Literal["tracked", "batch"] = "tracked",
    within_budgets: bool = False,
    masked: Masked = False,
    server_optimizer: ServerOptimizer = TAKE_MEAN,
) -> FedAvg:
    """FedAvg that minimizes (1 - share) · clean loss + share · loss under attack.

    Args:
        local_training: Settings of local training; None: the defaults.
        fraction: Fraction of the clients that take part in a round.
        width: Width of the net that every client trains.
        share: Weight of the loss under attack.
        epsilon: Largest change of a pixel by the attack.
        steps: Steps of the attack.
        step_size: Size of a step, in pixel units; None: min(1.25 ε, ε + 4/255) / steps.
        statistics: Of batch normalization: tracked, or those of each batch.
        within_budgets: Whether the width is at most what all clients can afford.
        masked: Whether the loss leaves out classes that a client does not have; "batch": those that
            a batch does not have, as in the public code.
        server_optimizer: What the server makes of the mean; by default it takes the mean itself.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> method = fq.fedavg_at(share=0.5, steps=2)
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> scores = run.evaluate(attack=fq.PGD(steps=2), workers=0)
    >>> 0 <= scores[0].robust_accuracy <= 1
    True
    """
    return FedAvg(
        local_training or LOCAL_TRAINING,
        fraction,
        width,
        statistics=statistics,
        objective=Adversarial(PGD(epsilon=epsilon, steps=steps, step_size=step_size), share),
        within_budgets=within_budgets,
        masked=masked,
        server_optimizer=server_optimizer,
    )


def fedavg_oat(
    local_training: LocalTraining | None = None,
    fraction: float = 1.0,
    width: float = 1.0,
    epsilon: float = 8 / 255,
    steps: int = 7,
    step_size: float | None = None,
    per_example: bool = False,
    within_budgets: bool = False,
    masked: Masked = False,
    server_optimizer: ServerOptimizer = TAKE_MEAN,
) -> FedAvg:
    """FedAvg with layers conditioned on λ, which is drawn for every batch or example.

    Args:
        local_training: Settings of local training; None: the defaults.
        fraction: Fraction of the clients that take part in a round.
        width: Width of the net that every client trains.
        epsilon: Largest change of a pixel by the attack.
        steps: Steps of the attack.
        step_size: Size of a step, in pixel units; None: min(1.25 ε, ε + 4/255) / steps.
        per_example: Whether every example has a λ of its own, as in OAT's paper; else a batch has.
        within_budgets: Whether the width is at most what all clients can afford.
        masked: Whether the loss leaves out classes that a client does not have; "batch": those that
            a batch does not have, as in the public code.
        server_optimizer: What the server makes of the mean; by default it takes the mean itself.

    >>> import torch, fedquilt as fq
    >>> data = (torch.rand(24, 4), torch.arange(24) % 3)
    >>> clients = fq.make_clients(data, test=data, count=4, budgets=(1.0, 0.5))
    >>> layers = (torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    >>> model = torch.nn.Sequential(*layers)
    >>> method = fq.fedavg_oat(steps=2)
    >>> run = fq.train(model, data[0][:1], method, clients, rounds=1, workers=0)
    >>> net = run.customize(robustness=0.5)  # a dial between accuracy and robustness
    >>> tuple(net(data[0]).shape)
    (24, 3)
    """
    return FedAvg(
        local_training or LOCAL_TRAINING,
        fraction,
        width,
        objective=OnceForAll(
            PGD(epsilon=epsilon, steps=steps, step_size=step_size), per_example=per_example
        ),
        conditional=True,
        within_budgets=within_budgets,
        masked=masked,
        server_optimizer=server_optimizer,
    )
