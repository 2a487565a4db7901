"""What is read back from a run's records."""

import json
from dataclasses import replace

from fedquilt.evaluation.scores import SizeScore
from fedquilt.report.records import (
    LocalTest,
    Milestone,
    count_bytes_to_reach,
    filter_last_phase,
    read_last_local_tests,
    read_local_tests,
    read_milestones,
    read_traffic,
)
from fedquilt.runs.directory import RunDirectory
from fedquilt.runs.records import read_final_scores

SCORE = SizeScore(1.0, 100, 1000, 0.9, None, 0.3, 50)


def test_final_scores_are_those_of_the_last_round(tmp_path):
    records = [
        {"round": 1, "scores": [], "is_final": False},
        {"round": 1, "loss": 0.5},
        {"round": 2, "scores": [SCORE.to_json()], "is_final": True},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert read_final_scores(RunDirectory(tmp_path), 2) == (SCORE,)
    assert (
        read_final_scores(RunDirectory(tmp_path), 3) == ()
    )  # a model of another round than was scored


def test_without_records_there_are_no_scores(tmp_path):
    assert read_final_scores(RunDirectory(tmp_path), 2) == ()
    assert list(read_milestones(RunDirectory(tmp_path))) == []
    assert (
        read_local_tests(RunDirectory(tmp_path)),
        read_last_local_tests(RunDirectory(tmp_path)),
        read_traffic(RunDirectory(tmp_path)),
    ) == ([], {}, {})


def recorded(folder, *records, timing=()):
    for name, lines in (("metrics.jsonl", records), ("timing.jsonl", timing)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def done(round, phase, down, up):
    return {"round": round, "phase": phase, "loss": 0.1, "bytes_down": down, "bytes_up": up}


def evaluated(round, *scores, closing=0):
    bytes_sent = {"bytes_down": closing, "bytes_up": closing}
    return {
        "round": round,
        "scores": [s.to_json() for s in scores],
        "is_final": False,
        **bytes_sent,
    }


def test_milestones_count_all_rounds_and_no_closing_phases(tmp_path):
    small = replace(SCORE, width=0.5)
    took = {1: 2.0, 2: 3.0, 3: 4.0}
    timing = [{"event": "RoundDone", "round": r, "seconds": s} for r, s in took.items()]
    timing.insert(1, {"event": "Evaluated", "round": 1, "seconds": 100.0})
    recorded(
        tmp_path,
        done(1, "warm-up", 10, 1),
        evaluated(1, small, SCORE, closing=5000),
        done(2, "search", 200, 0),
        done(3, "train", 3000, 2),
        evaluated(3, small, closing=5000),
        timing=timing,
    )
    assert list(read_milestones(RunDirectory(tmp_path))) == [
        Milestone(1, "warm-up", 2.0, 11, SCORE),  # of the largest net
        Milestone(3, "train", 9.0, 3213, small),
    ]


def reached(sent, user, own=None):
    score = replace(SCORE, value=user, personal_value=own)
    return Milestone(sent, "train", 0.0, sent, score)


def test_the_bytes_to_reach_an_accuracy_are_those_of_the_first_evaluation_with_it():
    progress = [reached(1, 0.2), reached(2, 0.5, 0.1), reached(3, 0.4, 0.3), reached(4, 0.6, 0.2)]
    assert [count_bytes_to_reach(progress, a) for a in (0.1, 0.5, 0.55, 0.7)] == [1, 2, 4, None]
    assert count_bytes_to_reach(progress, 0.2, lambda score: score.personal_accuracy) == 3
    assert count_bytes_to_reach([], 0.0) is None


def test_own_models_have_a_mean_for_every_round_and_a_last_time_for_every_client(tmp_path):
    recorded(
        tmp_path,
        {**done(1, "warm-up", 10, 1), "local": {"2": 0.25, "10": 0.75}},
        evaluated(1, SCORE),
        done(2, "search", 10, 1),  # of a version that knew of no tests
        {**done(3, "train", 10, 1), "local": {}},
        {**done(4, "train", 10, 1), "local": {"10": 0.5, "3": 1.0, "4": 0.0}},
    )
    tests = read_local_tests(RunDirectory(tmp_path))
    assert tests == [LocalTest(1, "warm-up", 0.5, 2), LocalTest(4, "train", 0.5, 3)]
    assert read_last_local_tests(RunDirectory(tmp_path)) == {2: 0.25, 3: 1.0, 4: 0.0, 10: 0.5}
    assert list(read_last_local_tests(RunDirectory(tmp_path))) == [2, 3, 4, 10]
    assert filter_last_phase(tests) == tests[1:]
    assert filter_last_phase([]) == []


def test_traffic_is_the_mean_over_those_who_were_asked_and_who_answered(tmp_path):
    recorded(
        tmp_path,
        {**done(1, "search", 9000, 9000), "num_clients": 3, "failures": []},
        {**done(2, "train", 120, 30), "num_clients": 2, "failures": [{"client": 1}]},
        {**done(3, "train", 80, 10), "num_clients": 2, "failures": []},
        evaluated(3, SCORE, closing=5000),
    )
    assert read_traffic(RunDirectory(tmp_path)) == {"up": 40 / 4, "down": 200 / 5}
