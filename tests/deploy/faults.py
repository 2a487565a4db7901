"""A client that misbehaves as its node is told to: shipped as an app, for tests of real runs.

The node's ``faults`` say what it does at its n-th order to train, such as ``{"2": "dies"}``;
``notes`` is a folder where it counts its orders, whichever process they come to.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
from flwr.app import Array, Context, Message

from fedquilt.deploy.client_app import make_client_app
from fedquilt.engines.flower.codec import ARRAYS, SETTINGS

LATE = 120.0  # seconds, longer than a round of the test may take
Answer = Callable[[Message, Context], Message]


def misbehave(message: Message, context: Context, answer: Answer) -> Message:
    """Flower's kind of a mod: does the fault of this order, if there is one."""
    if message.metadata.message_type != "train":
        return answer(message, context)
    notes = Path(str(context.node_config["notes"]))
    faults = json.loads(str(context.node_config["faults"]))
    number = _counted(notes)
    fault = faults.get(str(number))
    (notes / f"pid-{number}").write_text(str(os.getpid()))
    if fault == "raises":
        raise RuntimeError("it raised")
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "hangs":
        with mock.patch("fedquilt.deploy.client_app.run_task", side_effect=_wait):
            return answer(message, context)
    reply = answer(message, context)
    settings = reply.content.config_records[SETTINGS]
    token = notes / "token"
    if fault == "is late":
        time.sleep(LATE)
    elif fault == "NaN":
        _change(reply, lambda values: values * np.float32("nan"))
    elif fault == "another shape":
        _change(reply, lambda values: np.concatenate([values, values]))
    elif fault == "another run":
        settings["run"] = "foreign"
    elif fault == "another round":
        settings["token"] = token.read_text()
    token.write_text(str(settings.get("token")))
    return reply


def _wait(*_: object) -> None:
    time.sleep(3600)


def _counted(notes: Path) -> int:
    """Which order this is, from 1 on."""
    number = 1
    while True:
        try:
            (notes / f"order-{number}").touch(exist_ok=False)
            return number
        except FileExistsError:
            number += 1


def _change(reply: Message, change: Callable[[np.ndarray], np.ndarray]) -> None:
    arrays = reply.content.array_records[ARRAYS]
    name = next(iter(arrays))
    arrays[name] = Array(change(arrays[name].numpy()))


client = make_client_app(mods=[misbehave])
