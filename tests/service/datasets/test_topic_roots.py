"""Datasets that are topics: of brokers that the operator names, as a run sends its password to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.core.errors import Problem
from service.core.settings import Settings
from service.datasets import paths, registry
from trainer.spec import parse_dataset

ROOTS = Settings(topic_roots=("kafka://one:9092,two:9092", "kafka://three:9092/clicks"))


def test_topics_of_brokers_that_are_roots_are_taken_without_a_look() -> None:
    for uri in ("kafka://one:9092/a", "kafka://two:9092,one:9092/b", "kafka://three:9092/clicks"):
        assert paths.allowed_uri(ROOTS, uri, "uri") == uri


@pytest.mark.parametrize(
    "uri",
    ["kafka://one:9093/a", "kafka://one:9092,four:9092/a", "kafka://three:9092/clicks2", "kafka://one:9092",
     "kafka://me:secret@one:9092/a", "KAFKA://one:9092/a"],
)  # fmt: skip
def test_others_are_refused(uri: str) -> None:
    with pytest.raises(Problem) as raised:
        paths.allowed_uri(ROOTS, uri, "uri")
    assert raised.value.status == 422
    assert "secret" not in str(raised.value)


def test_roots_come_from_the_environment_and_are_of_one_tenant() -> None:
    found = Settings.from_environment({
        "EVENKEEL_DATA_ROOTS": "/data:kafka://one:9092,two:9092:2026:kafka://three:9092/clicks:s3://b/c",
        "EVENKEEL_TENANT_DATA_ROOTS": "a=kafka://four:9092:b=/b",
    })  # fmt: skip
    assert found.topic_roots == ROOTS.topic_roots
    assert found.data_roots == (Path("/data"), Path("2026").resolve())
    assert found.object_roots == ("s3://b/c",)
    assert found.for_tenant("a").topic_roots == ("kafka://four:9092",)
    assert found.for_tenant("b").topic_roots == ()


def test_columns_are_those_that_are_declared() -> None:
    described = {"name": "d", "uri": "kafka://one:9092/a", "messages": {"columns": {"user": "int64", "click": "int64"}},
                 "features": {"user": {}}, "label": {"column": "click"}}  # fmt: skip
    assert registry.check_files(ROOTS, parse_dataset(described)).uri == "kafka://one:9092/a"
    with pytest.raises(Problem, match="no column 'clicked'"):
        registry.check_files(ROOTS, parse_dataset(described | {"label": {"column": "clicked"}}))
