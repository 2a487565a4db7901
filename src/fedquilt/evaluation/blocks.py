"""What submodels have learned, block by block: their steps, and how large their weights are."""

from __future__ import annotations

from fedquilt.federation.state import Setup, State
from fedquilt.methods.method import Method
from fedquilt.structure.cut import copy_subnet_tensors, global_name

ByBlock = dict[str, dict[str, float]]  # size -> block -> value


def read_step_sizes(setup: Setup, method: Method, state: State) -> ByBlock:
    """The step of every block that each size keeps (NeFL, Fig. 3a)."""
    found: ByBlock = {}
    for size in method.sizes(setup):
        for subnet in method.ensemble(setup, state, size):
            for block in setup.structure.blocks.values():
                if block.step is None or block.name in subnet.skipped:
                    continue
                own = global_name(block.step, setup.structure, subnet)
                value = state.params[own if own in state.params else block.step]
                found.setdefault(f"{size:g}", {})[block.name] = float(value)
    return found


def compute_mean_weights(setup: Setup, method: Method, state: State) -> ByBlock:
    """The mean absolute weight of every block that each size keeps (NeFL, Fig. 3b).

    Only weights of convolutions and linear layers: those with two axes or more.
    """
    found: ByBlock = {}
    for size in method.sizes(setup) if setup.structure.blocks else ():
        for subnet in method.ensemble(setup, state, size):
            tensors = copy_subnet_tensors(state.params, setup.structure, subnet)
            for block in setup.structure.blocks.values():
                weights = [tensors[n] for n in block.tensors if n in tensors]
                large = [w for w in weights if w.ndim > 1]
                if large:
                    total = sum(float(w.abs().sum()) for w in large)
                    count = sum(w.numel() for w in large)
                    found.setdefault(f"{size:g}", {})[block.name] = total / count
    return found
