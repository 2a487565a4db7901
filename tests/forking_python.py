"""A Python that has imported fedquilt, and forks a process for every program that it is given.

Importing takes seconds, and tests start a hundred programs. A line of input is JSON: the words of a
command of ours (after ``fedquilt``) or the path of a program, its directory, and a file for what it
prints. The answer is its exit code.
"""

import json
import os
import runpy
import sys

import sklearn.datasets  # noqa: F401  most programs load digits,
import torch._dynamo  # noqa: F401  and PyTorch imports this when it trains

import fedquilt.cli


def run(arguments: list[str], program: str | None, folder: str, output: str) -> None:
    """Runs as ``fedquilt …``, or ``python program``, does in a process of its own."""
    os.chdir(folder)
    for descriptor in (1, 2):
        os.dup2(
            os.open(f"{output}.{descriptor}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor
        )
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if program is None:
        sys.argv = ["fedquilt", *arguments]
        fedquilt.cli.main(arguments)
    else:
        sys.argv = [program]
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            run(**json.loads(line))
            break  # and ends as every program does
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
