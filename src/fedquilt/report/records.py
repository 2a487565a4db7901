"""What a run has written down about itself."""

from __future__ import annotations

import json
from pathlib import Path

from fedquilt.evaluation.accuracy import SizeScore


def final_scores(folder: Path) -> tuple[SizeScore, ...]:
    """The scores at the end of a finished run; none, if its records are gone."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    finals = [record for record in map(json.loads, lines) if record.get("is_final")]
    return tuple(SizeScore(**score) for score in finals[-1]["scores"]) if finals else ()
