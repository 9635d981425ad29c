"""Features whose names a job's modules or batches have for something else are refused, naming the remedy."""

from __future__ import annotations

import pytest
from torch import nn

from trainer.data.prepare.plan import NEGATIVE_SUFFIX
from trainer.spec import parse_dataset, parse_job
from trainer.spec.checks.feature_names import NAMES_OF_MODULES, NEGATIVE


def checked(features, kind="dnn", **changes):
    own = {"user": {}, "item": {}}
    label = {"column": "click"}
    dataset = parse_dataset(
        {"name": "rows", "uri": "a.parquet", "features": own | features, "label": label, "order": "at"}
    )
    job = parse_job({"name": "job", "dataset": {"name": "rows"}, "model": {"kind": kind}} | changes)
    return job.against(dataset)


def test_all_names_of_the_module_that_holds_tables_are_known():
    assert {name for name in dir(nn.ModuleDict()) if not name.startswith("__")} <= NAMES_OF_MODULES


@pytest.mark.parametrize(
    ("features", "kind", "message"),
    [
        ({"type": {}}, "dnn", "feature 'type': a table cannot have the name 'type', .*another name and column: type"),
        ({"items": {"column": "b"}}, "bpr", "feature 'items': a table cannot have the name 'items', .* another name$"),
        (
            {"half": {"type": "id_list"}, "b": {"shares": "half"}},
            "dnn",
            "feature 'half': a table cannot have the name 'half'",
        ),
        ({"item": {"shares": "keys"}, "keys": {}}, "sasrec", "feature 'keys': a table cannot have the name 'keys'"),
        (
            {"item__negative": {"column": "b"}},
            "bpr",
            "feature 'item__negative': the job uses this name for negatives of 'item'",
        ),
    ],
)
def test_names_that_are_taken_are_refused(features, kind, message):
    with pytest.raises(ValueError, match=message):
        checked(features, kind)


@pytest.mark.parametrize(
    ("features", "kind"),
    [
        ({"type": {"type": "dense"}, "values": {"type": "vector", "dim": 3}}, "dnn"),
        ({"type": {"shares": "item"}, "kind": {"column": "type"}}, "dnn"),
        ({"item__negative": {"column": "b"}}, "dnn"),
        ({"type": {}, "item__negative": {}}, "sasrec"),
    ],
)
def test_names_that_only_others_would_take_are_not(features, kind):
    checked(features, kind)


def test_a_feature_named_as_negatives_is_not_swapped_as_what_they_are_drawn_for():
    checked({"user__negative": {}}, model={"kind": "dnn"})
    with pytest.raises(ValueError, match=r"'user__negative': the job uses this name for negatives of 'user'"):
        checked({"user__negative": {}}, sse={"user": {"probability": 0.1}})


def test_the_suffix_is_that_of_batches():
    assert NEGATIVE == NEGATIVE_SUFFIX
