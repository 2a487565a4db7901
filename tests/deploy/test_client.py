"""A process that works for many clients in turn, as those of a simulation do."""

from __future__ import annotations

import gc

from fedquilt.structure.groups import Structure


def test_the_clients_of_a_process_share_one_net(place):
    """Caches hold on to structures, so that one for each order would fill the memory."""
    alive = []

    def count(message, answer):
        reply = answer(message)
        if message.metadata.message_type == "train":
            gc.collect()
            alive.append(sum(type(thing) is Structure for thing in gc.get_objects()))
        return [reply]

    place.flower(count, model__name="mlp", model__hidden="[16]", model__width=None)
    assert len(alive) > 3
    assert len(set(alive)) == 1
