"""Which row optimizers by frequency bucket a job may not have, and what the error says to do."""

from __future__ import annotations

import pytest

from trainer.spec import parse_job
from trainer.spec.problems import SpecError

RARE = {"buckets": [1, 2], "kind": "adam_ar", "alpha": 0.003}
ADAMW = {"kind": "adamw", "weight_decay": 0.1, "learning_rate": 0.05}


def document(rules: list[dict], optimizer: dict = ADAMW, **changes) -> dict:
    return {
        "name": "job",
        "dataset": {"name": "rows"},
        "model": {"kind": "dnn"},
        "optimizer": {**optimizer, "by_frequency": rules},
    } | changes


@pytest.mark.parametrize(
    ("rules", "changes", "said"),
    [
        ([RARE, {**RARE, "buckets": [2]}], {}, "by_frequency: bucket 2 is named twice: name each bucket once"),
        ([{**RARE, "kind": "adagrad_ar"}], {}, "0.kind: adagrad_ar keeps another state than adamw: use one of adam, "),
        ([{"buckets": [1], "kind": "adam_ar"}], {}, "0.alpha: optimizer.kind adamw has none that it could be: give"),
        ([{"buckets": [1], "kind": "adam", "alpha": 0.1}], {}, "0.alpha: adam has none: use one of adam_ar, "),
        ([{"buckets": [1], "kind": "adamw"}], {}, "0.weight_decay: adamw is adam with it: set it"),
        ([{**RARE, "weight_decay": 0.1}], {}, "0.weight_decay: adam_ar has none: use one of adamw, "),
        ([RARE], {"tables": {"item": {"capacity": 100}}}, "buckets are of rows that are counted before training"),
        ([RARE], {"kernel": "fbgemm"}, "fbgemm has one optimizer for a table: use kernel evenkeel"),
        ([RARE], {"regularizers": {"sam": {"rho": 0.1}}}, "regularizers.sam moves the rows of one optimizer"),
    ],
)  # fmt: skip
def test_what_has_no_meaning(rules, changes, said) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(document(rules, **changes))
    assert any(said in str(problem) for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("rule", "said"),
    [({**RARE, "buckets": [6]}, "less than or equal to 5"), ({**RARE, "buckets": []}, "at least 1 item")],
)
def test_what_is_no_rule(rule, said) -> None:
    with pytest.raises(SpecError, match=said):
        parse_job(document([rule]))


def test_rules_that_fit_are_taken() -> None:
    assert parse_job(document([RARE])).optimizer.by_frequency[0].buckets == (1, 2)
