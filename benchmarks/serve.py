"""Serving under load: requests a second and latency, against a bare FastAPI + PyTorch handler.

    python benchmarks/serve.py [--seconds 5] [--repeats 3] [--clients 16] [--save]

Both servers run the same network at sizes 1 and 1/4, one after the other in turns, on this machine
over loopback; each request is one image as JSON numbers. The load comes from this process, with as
many keep-alive connections as there are clients, each sending its next request when its answer is
there. Figures are medians over repeats.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import uvloop

import fedquilt as fq

SHAPE = (1, 28, 28)
WIDTHS = (1.0, 0.25)


def train_something(folder):
    """A run of one round on noise: its speed is that of a real one."""
    torch.manual_seed(0)
    data = (torch.rand(40, *SHAPE), torch.arange(40) % 10)
    clients = fq.make_clients(data, count=2, budgets=WIDTHS)
    model = fq.make_model("heterofl-cnn", {"in_channels": 1, "num_classes": 10})
    local = fq.LocalTraining(epochs=1, batch_size=20)
    method = fq.HeteroFL(local, own_rows=False)
    fq.train(model, data[0][:1], method, clients, 1, workers=0, out=folder)


def start_ours(folder, width):
    command = [sys.executable, "-m", "fedquilt", "serve", str(folder), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    document = ""
    for line in process.stdout:
        document += line
        if line == "}\n":
            break
    port = int(json.loads(document)["url"].rstrip("/").rpartition(":")[2])
    return process, port, f"/predict?size={width}"


def start_bare(folder, width, kind="def"):
    command = [sys.executable, __file__, "--bare", str(folder), str(width), kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline()), "/predict"


def run_bare(folder, width, kind):
    """What one would write without us: a handler in FastAPI's threads, or in its event loop."""
    import socket

    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    from fedquilt.runs.from_config import open_configured_run

    torch.set_num_threads(1)
    model = open_configured_run(folder).customize(width)
    app = FastAPI()

    class Body(BaseModel):
        inputs: list[list[list[float]]]

    def predict(body: Body):
        with torch.inference_mode():
            probabilities = model(torch.tensor([body.inputs])).softmax(-1)[0]
        confidence, label = probabilities.max(0)
        return {
            "label": label.item(),
            "confidence": confidence.item(),
            "probabilities": probabilities.tolist(),
        }

    async def predict_in_loop(body: Body):
        return predict(body)

    app.post("/predict")(predict_in_loop if kind == "async" else predict)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


SERVERS = {
    "fedquilt serve": start_ours,
    "bare, def": start_bare,
    "bare, async def": partial(start_bare, kind="async"),
}


def make_request(path, port):
    body = json.dumps({"inputs": torch.rand(SHAPE).mul(1000).round().div(1000).tolist()}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def send_requests(port, request, end, times):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < end:
        start = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(size)
        times.append(time.perf_counter() - start)
    writer.close()


async def apply_load(port, path, clients, seconds):
    """Requests a second, and the median and 99th percentile of their times in milliseconds."""
    request = make_request(path, port)
    for _ in range(200):  # a server that does not listen yet
        try:
            await send_requests(port, request, time.perf_counter() + 0.5, [])
            break
        except OSError:
            await asyncio.sleep(0.1)
    times = []
    start = time.perf_counter()
    jobs = (send_requests(port, request, start + seconds, times) for _ in range(clients))
    await asyncio.gather(*jobs)
    rate = len(times) / (time.perf_counter() - start)
    cuts = statistics.quantiles(times, n=100)
    return rate, 1000 * cuts[49], 1000 * cuts[98]


def measure(start, folder, width, options):
    process, port, path = start(folder, width)
    try:
        loop = apply_load(port, path, options.clients, options.seconds)
        return uvloop.run(loop)
    finally:
        process.terminate()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bare", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--save", action="store_true", help="store the figures")
    options = parser.parse_args()
    if options.bare:
        run_bare(Path(options.bare[0]), float(options.bare[1]), options.bare[2])
        return
    from record import Recorder, Table  # not in a server

    recorder, cells = Recorder("serve", options.save), []
    with tempfile.TemporaryDirectory() as folder:
        train_something(Path(folder) / "run")
        for width in WIDTHS:
            results = {name: [] for name in SERVERS}
            for _ in range(options.repeats):
                for name, start in SERVERS.items():
                    results[name].append(measure(start, Path(folder) / "run", width, options))
            for name, runs in results.items():
                rate, median, late = map(statistics.median, zip(*runs, strict=True))
                cells.append((f"{width:g}", name, f"{rate:.0f}", f"{median:.1f}", f"{late:.0f}"))
    header = "size", "server", "requests/s", "p50 ms", "p99 ms"
    notes = (
        "HeteroFL's CNN on images of 28 x 28 points, one image a request as JSON, "
        f"{options.clients} clients on loopback, {os.cpu_count()} cores that the load shares, one "
        "thread a model, servers in turn.",
        "The bare handlers are what one would write with FastAPI and PyTorch: in its threads "
        "(def), or in its event loop (async def).",
    )
    recorder.finish(Table("Serving", header, cells, notes))


if __name__ == "__main__":
    main()
