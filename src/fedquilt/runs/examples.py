"""Whether a run that goes on has the examples that it began with.

The identity of a run knows how many examples and which labels clients have, not the examples. A
hash of some of them is kept beside it.
"""

from __future__ import annotations

import hashlib

import torch

from fedquilt.data.client_sets import LazyData, list_samples
from fedquilt.data.population import Population
from fedquilt.errors import CheckpointError
from fedquilt.files import hash_tensor, read_document, write_document
from fedquilt.learning.batch import as_batch
from fedquilt.runs.directory import RunDirectory
from fedquilt.structure.tensors import find_tensors

NUM_SETS, NUM_ROWS = 4, 16  # that are looked at
KEY = "sha256"


def check_examples(
    directory: RunDirectory | None, population: Population, *, is_resumed: bool
) -> None:
    """Keeps a hash of examples of a new run; refuses to go on with other ones.

    Raises:
        CheckpointError: The run has begun with other examples.
    """
    digest = None if directory is None else hash_examples(population)
    if directory is None or digest is None:
        return
    path = directory.examples_file
    if not is_resumed:
        write_document(path, {KEY: digest})
    elif path.exists() and read_document(path).get(KEY) != digest:
        raise CheckpointError(
            f"{directory} was begun with other examples; give it the same data in the same order, "
            "or start a run in another directory"
        )


def hash_examples(population: Population) -> str | None:
    """The SHA-256 of the first examples of some clients; None if their data are not here.

    What a function of the user makes need not be the same each time, and is passed over.
    """
    train = population.train
    if not len(train) or (isinstance(train, LazyData) and train.is_made_by_function):
        return None
    digest = hashlib.sha256()
    for examples in list_samples(train)[:NUM_SETS]:
        rows = torch.arange(min(len(examples), NUM_ROWS))
        with torch.random.fork_rng(devices=[]):
            batch = as_batch(examples.batch(rows, torch.Generator()))
        for tensor in find_tensors(tuple(batch)):
            digest.update(hash_tensor(tensor).encode())
    return digest.hexdigest()
