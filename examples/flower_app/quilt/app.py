"""Your model and your data, trained over nodes of every size.

Nodes say who they are and what they can afford when they are started:

    flower-supernode … --node-config "partition-id=0 budget=1.0"
    flower-supernode … --node-config "partition-id=1 budget='auto'"

``budget='auto'`` is measured on the device: the largest subnet that meets the deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedquilt.deploy.client_app import make_client_app
from fedquilt.deploy.server_app import make_server_app


class Net(nn.Module):
    """Any model: fedquilt finds out by itself what can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.hidden = nn.Linear(32 * 16, 64)
        self.classes = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.classes(torch.relu(self.hidden(x.flatten(1))))


def digits(rows: slice) -> tuple[Tensor, Tensor]:
    whole = load_digits()
    images = torch.tensor(whole.images[rows], dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(whole.target[rows])


def own_data(node: Mapping[str, Any]) -> Any:
    """What this node trains and tests on: here every third of the first 1,500 digits."""
    number = int(node["partition-id"])
    return digits(slice(number, 1200, 3)), digits(slice(1200 + number, 1500, 3))


client = make_client_app(model=Net, data=own_data)
server = make_server_app(model=Net, test=digits(slice(1500, None)))
