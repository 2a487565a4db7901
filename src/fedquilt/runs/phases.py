"""Which phase a round belongs to, and how many rounds there are."""

from __future__ import annotations

from fedquilt.errors import ConfigError
from fedquilt.federation.state import Phase, Setup, State
from fedquilt.methods.method import Method


def count_rounds(method: Method, setup: Setup) -> int:
    """The rounds of all phases but the closing ones."""
    return sum(phase.rounds for phase in method.phases(setup) if not phase.is_closing)


def find_phase(round: int, method: Method, setup: Setup) -> Phase:
    """The phase that a round, counted from 0, belongs to."""
    for phase in method.phases(setup):
        if not phase.is_closing:
            if round < phase.rounds:
                return phase
            round -= phase.rounds
    raise AssertionError("a round after the last phase")


def require_same_rounds(state: State, method: Method, setup: Setup) -> None:
    """Checks that a run of this many rounds can continue from the state."""
    total = count_rounds(method, setup)
    if state.round > total:
        raise ConfigError(
            f"a resumed run has at least the rounds that it has done, {state.round}, got {total}; "
            "give more rounds"
        )
    if state.round and (phase := find_phase(state.round - 1, method, setup)).name != state.phase:
        raise ConfigError(
            f"the run has done {state.round} rounds and was in its phase {state.phase}; with "
            f"{setup.rounds} rounds of training that would be {phase.name}; resume it with as many "
            "rounds as it was started with"
        )
