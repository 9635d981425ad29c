"""Features whose names a job's modules or batches have for something else are refused, naming the remedy."""

from __future__ import annotations

import pytest
from torch import nn

from trainer.spec import parse_dataset, parse_job
from trainer.spec.checks.feature_names import NAMES_OF_MODULES


def checked(features, kind="dnn"):
    own = {"user": {}, "item": {}}
    label = {"column": "click"}
    dataset = parse_dataset(
        {"name": "rows", "uri": "a.parquet", "features": own | features, "label": label, "order": "at"}
    )
    job = parse_job({"name": "job", "dataset": {"name": "rows"}, "model": {"kind": kind}})
    return job.against(dataset)


def test_all_names_of_the_module_that_holds_tables_are_known():
    assert {name for name in dir(nn.ModuleDict()) if not name.startswith("__")} <= NAMES_OF_MODULES


@pytest.mark.parametrize(
    ("features", "kind", "message"),
    [
        ({"type": {}}, "dnn", "feature 'type': no table can be named 'type', .*another name and column: type"),
        ({"items": {"column": "b"}}, "bpr", "feature 'items': no table can be named 'items', .* another name$"),
        ({"half": {"type": "id_list"}, "b": {"shares": "half"}}, "dnn", "feature 'half': no table can be named 'half'"),
        ({"item": {"shares": "keys"}, "keys": {}}, "sasrec", "feature 'keys': no table can be named 'keys'"),
        ({"item__negative": {"column": "b"}}, "bpr", "feature 'item__negative': bpr names the items that it draws"),
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
