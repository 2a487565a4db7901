"""Where the runs of comparisons are kept: each under its address, so that none is done twice."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from fedquilt.comparison.results import TrialResult
from fedquilt.comparison.trial import Address
from fedquilt.errors import CheckpointError
from fedquilt.files import hold_lock, read_document, write_document
from fedquilt.runs.directory import RunDirectory


class TrialStore:
    """A folder of runs and their results.

    ``runs/ADDRESS`` are directories of runs, ``results/ADDRESS.json`` what a comparison needs of
    them: one result, or one for each way of scoring. A run is done when its result is there. Run
    directories may be removed; results alone are enough for tables.

    Args:
        folder: The folder, which is made when something is kept in it.
        any_code: Whether results that other code made count, if all else is the same.
    """

    def __init__(self, folder: str | Path, *, any_code: bool = False) -> None:
        self.folder, self.any_code = Path(folder), any_code

    def get_run(self, address: Address) -> RunDirectory:
        """The directory of a run, which may not be there yet."""
        return RunDirectory(self.folder / "runs" / address.run)

    def find_result(self, address: Address) -> TrialResult | None:
        """The result of a run; None if it is not done."""
        path = self._get_path(address)
        if not path.is_file() and self.any_code:
            pattern = f"{address.name}-{address.content}-*.json"
            others = sorted(path.parent.glob(pattern), key=lambda p: p.stat().st_mtime)
            path = others[-1] if others else path
        return TrialResult.from_document(read_document(path)) if path.is_file() else None

    def add_result(self, address: Address, result: TrialResult) -> None:
        """Keeps the result of a run, which is done from now on."""
        path = self._get_path(address)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_document(path, result.to_document())

    def _get_path(self, address: Address) -> Path:
        return self.folder / "results" / f"{address}.json"

    def hold(self) -> AbstractContextManager[None]:
        """Locks the folder: two comparisons in it would do the same runs."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise CheckpointError(
                f"{self.folder} cannot hold a comparison ({problem}); choose another: out='...'"
            ) from problem
        return hold_lock(self.folder / "lock", lambda: None)
