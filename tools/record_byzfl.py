"""Records what byzfl's robust rules give for a few vectors, as an oracle of ours.

Run by hand, after ``pip install --no-deps byzfl==0.0.11``:

    python tools/record_byzfl.py > tests/federation/data/byzfl.json

The package imports torchvision, which has no build for every PyTorch. Its rules do not need it, so
they are imported alone. Tests read the file and need neither package.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

import numpy as np


def import_rules() -> ModuleType:
    """Imports byzfl's rules, and not its benchmark."""
    spec = find_spec("byzfl")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("byzfl is not installed: pip install --no-deps byzfl==0.0.11")
    package = ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["byzfl"] = package
    return import_module("byzfl.aggregators")


def main() -> None:
    """Prints vectors, and what each rule makes of them."""
    byzfl = import_rules()
    vectors = np.random.default_rng(0).normal(0.5, 1.0, (9, 17))
    vectors[7] *= -10  # two hostile ones
    vectors[8] += 25
    rules = {
        "trimmed-mean": byzfl.TrMean(2),
        "median": byzfl.Median(),
        "geometric-median": byzfl.GeometricMedian(nu=0.1, T=20),
        "centered-clipping": byzfl.CenteredClipping(L=3, tau=2.0),
        "krum": byzfl.Krum(2),
        "multi-krum": byzfl.MultiKrum(2),
    }
    mixed = byzfl.NNM(2)(vectors)
    results = {name: rule(vectors).tolist() for name, rule in rules.items()}
    rules["centered-clipping"] = byzfl.CenteredClipping(L=3, tau=2.0)  # it remembers
    results |= {f"nnm {name}": rule(mixed).tolist() for name, rule in rules.items()}
    facts = {"byzfl": version("byzfl"), "vectors": vectors.tolist(), "results": results}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
