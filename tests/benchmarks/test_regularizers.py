"""The cost of a step is told for every method that is asked for, beside a step without a regularizer."""

from __future__ import annotations

import json

import pytest

from benchmarks.regularizers import OTHERS, jobs_of, main


def test_methods_take_steps_in_turns_and_cost_is_told_by_that_of_none(capsys):
    assert main(["--quick", "--steps", "15", "--methods", "DROPOUT_8,R_approx + xi_approx,SAM"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert [one["case"] for one in told] == [
        "clicklog B128 DROPOUT_8", "clicklog B128 R_approx + xi_approx", "clicklog B128 SAM",
    ]  # fmt: skip
    assert all((one["peer"], one["iterations"]) == ("none", 15) and one["ratio"] > 0 for one in told)
    assert lines[-3].startswith("| DROPOUT_8 | ")
    assert lines[-1].startswith("| SAM | ")


def test_jobs_are_those_of_the_recipes_table_and_others(tmp_path):
    dataset, jobs = jobs_of(tmp_path, False)
    assert dataset.name == "epinions"
    assert list(jobs)[:2] == ["none", "DROPOUT_1"]
    assert set(OTHERS) < set(jobs)
    assert len({job.model_dump_json(include={"regularizers"}) for job in jobs.values()}) == len(jobs)


def test_an_unknown_method_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--quick", "--methods", "DROPOUT_9"])
    assert "no such method: DROPOUT_9 (there are none, DROPOUT_1" in capsys.readouterr().err


def test_a_training_has_no_more_steps_than_it_has():
    with pytest.raises(ValueError, match="no more than"):
        main(["--quick", "--steps", "1000", "--methods", "none"])
