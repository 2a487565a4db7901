"""What is read back from a run's records."""

import json
from dataclasses import asdict

from fedquilt.evaluation.accuracy import SizeScore
from fedquilt.report.records import final_scores

SCORE = SizeScore(1.0, 100, 1000, 0.9, None, 0.3, 50)


def test_final_scores_are_the_last_that_are_final(tmp_path):
    records = [
        {"round": 1, "scores": [], "is_final": False},
        {"round": 1, "loss": 0.5},
        {"round": 2, "scores": [asdict(SCORE)], "is_final": True},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert final_scores(tmp_path) == (SCORE,)


def test_without_records_there_are_no_scores(tmp_path):
    assert final_scores(tmp_path) == ()
