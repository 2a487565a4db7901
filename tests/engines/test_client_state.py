"""Files of what clients keep."""

from __future__ import annotations

import torch

from fedquilt.engines import client_state
from fedquilt.engines.client_state import ClientStateStore, write_client_state


def test_each_file_waits_for_the_disk_once(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(client_state, "fsync", waited.append)
    store = ClientStateStore(tmp_path)
    for client, version in ((0, 1), (1, 1), (1, 2)):
        write_client_state(store.path(client, version), {"x": torch.zeros(1)})
    store.sync({0: 1}, {0: 1, 1: 1})
    assert sorted(waited) == [tmp_path, store.path(0, 1), store.path(1, 1)]
    waited.clear()
    store.sync({0: 1}, {0: 1, 1: 2})
    assert waited == [store.path(1, 2), tmp_path]  # the folder last, which names it
    waited.clear()
    store.sync({0: 1, 1: 2, 7: 3})  # files of others are elsewhere
    assert waited == []
