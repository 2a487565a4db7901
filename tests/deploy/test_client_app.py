"""A process that works for many clients in turn, as those of a simulation do."""

from __future__ import annotations

import gc

import pytest
from ray import cloudpickle

from fedquilt.deploy.client_app import make_client_app
from fedquilt.deploy.server_app import train_over_grid
from fedquilt.structure.structure import Structure


@pytest.mark.parametrize("is_copied", [False, True])
def test_the_clients_of_a_process_share_one_net(place, is_copied):
    """Caches hold on to structures, so that one for each message would fill the memory."""
    alive, app = [], make_client_app()

    def count(message, answer):
        if is_copied:  # as a simulation does with every message
            grid._app = cloudpickle.loads(cloudpickle.dumps(app))
        reply = answer(message)
        if message.metadata.message_type == "train":
            gc.collect()
            alive.append(sum(type(thing) is Structure for thing in gc.get_objects()))
        return [reply]

    net = {"model__name": "mlp", "model__hidden": "[16]", "model__width": None}
    changes = {**net, "data__fraction": 0.05, "rounds": 2}
    grid = place.grid(count, **changes)
    train_over_grid(grid, place.config("flower", **changes))
    assert len(alive) > 3
    assert len(set(alive)) == 1
