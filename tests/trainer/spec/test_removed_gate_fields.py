"""``publish.gate.calibrate``, ``calibrate_seconds``, ``promote``: refused in a new job, dropped from a stored one."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.spec import SpecError, parse_job
from trainer.spec.stored_specs import to_run


def job(**gate: Any) -> dict[str, Any]:
    publish = {"collection": "items", "feature": "item", "gate": {"mode": "report", **gate}}
    return {"name": "j", "dataset": {"name": "log"}, "model": {"kind": "bpr", "loss": "bpr"}, "publish": publish}


@pytest.mark.parametrize(
    ("field", "value"), [("calibrate", "auto"), ("calibrate", "off"), ("calibrate", False), ("calibrate_seconds", 600)]
)
def test_a_new_job_is_refused_by_name_with_the_remedy(field: str, value: Any) -> None:
    with pytest.raises(SpecError) as refused:
        parse_job(job(**{field: value}))
    (problem,) = refused.value.problems
    assert (problem.field, problem.message) == (f"publish.gate.{field}", "was removed: no job trains to set limits")
    assert problem.remedy == "leave it out: limits come from the collection's own published refreshes"


def test_a_rule_of_a_new_job_is_refused_and_told_what_ends_a_row() -> None:
    with pytest.raises(SpecError) as refused:
        parse_job(job(promote={"only": ["cosine_mean"]}))
    (problem,) = refused.value.problems
    assert problem.field == "publish.gate.promote"
    assert problem.message == "was removed: no rule is needed to end a row of held refreshes"
    assert problem.remedy == "leave it out: publish.gate.when_stuck has replaced it"


def test_a_stored_job_runs_without_them() -> None:
    gone = {"calibrate": "off", "calibrate_seconds": 60.0, "promote": {"only": ["turn_p999"], "settled": True}}
    stored = job(**gone)
    assert parse_job(to_run(stored)) == parse_job(job())
    assert parse_job(stored, stored=True) == parse_job(job(), stored=True)
    assert stored == job(**gone), "what is stored stays as it is"
    with pytest.raises(SpecError, match=r"publish\.gate\.max_hold: no such field"):
        parse_job(to_run(job(max_hold=3)))


@pytest.mark.parametrize("document", [None, [], {}, {"publish": None}, {"publish": {"gate": None}}, {"publish": 1}])
def test_what_has_no_gate_is_left_alone(document: Any) -> None:
    assert to_run(document) is document
