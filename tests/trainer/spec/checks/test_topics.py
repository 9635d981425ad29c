"""Datasets that are topics, and the jobs that follow them: what is refused is named, with the remedy."""

from __future__ import annotations

import pytest

from tests.trainer.spec.checks.test_one_pass import job_of
from trainer.data.errors import DataError
from trainer.data.prepare.plan import make_plan
from trainer.data.sources.source import Source
from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.problems import InvalidFieldsError

URI = "kafka://one:9092,two.example.org:9093/clicks"
SASL = {"username": "EVENKEEL_KAFKA_U", "password": "EVENKEEL_KAFKA_P"}
COLUMNS = {"user": "int64", "item": "string", "click": "int64"}


def dataset_of(security=None, **changes):
    messages = {"columns": COLUMNS} | ({} if security is None else {"security": security})
    document = {"name": "log", "uri": URI, "messages": messages, "features": {"user": {}, "item": {}},
                "label": {"column": "click"}}  # fmt: skip
    return parse_dataset({key: value for key, value in (document | changes).items() if value is not None})


def following(**settings):
    split = {"split": {"validation": 0, "test": 0}}
    return job_of(dataset={"name": "log", "one_pass": True, "follow": settings}, evaluation=split)


def test_a_topic_is_followed_and_may_have_bad_rows():
    dataset = dataset_of(SASL | {"protocol": "sasl_ssl", "ca": "EVENKEEL_KAFKA_CA"}, max_bad_rows=0.01)
    job = following(start="2026-11-25T09:00:00+01:00", away_seconds=30)
    job.against(dataset)
    assert job.dataset.follow.start_milliseconds == 1_795_593_600_000
    plan = make_plan(dataset, job)
    assert plan.kinds == {"user": "int", "item": "string"}
    assert "start" not in following().model_dump(mode="json")["dataset"]["follow"]
    assert "messages" not in parse_dataset(
        {"name": "l", "uri": "rows", "features": {"user": {}}, "label": {"column": "click"}}
    ).model_dump(mode="json")


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"uri": "kafka://one:9092"}, "uri", "use this form"),
        ({"uri": "kafka://me:secret@one:9092/clicks"}, "uri", "without user name and password"),
        ({"uri": "rows"}, "messages", "leave it out, or set uri: kafka://"),
        ({"messages": None}, "messages", "give messages.columns"),
        ({"security": {"protocol": "sasl_ssl"}}, "messages.security", "name the variables"),
        ({"security": SASL}, "messages.security.username", "set another protocol"),
        ({"security": {"ca": "EVENKEEL_KAFKA_CA"}}, "messages.security.ca", "set another protocol"),
        ({"security": {"ca": "EVENKEEL_SECRET_KEY"}}, "messages.security.ca", ""),
        ({"messages": {"columns": {"user": "int32"}}}, "messages.columns.user", ""),
        ({"graphs": {"g": {"uri": URI, "source": "a", "target": "b", "of": "user"}}}, "graphs.g.uri", "name a file"),
    ],
)  # fmt: skip
def test_a_topic_that_is_described_wrongly_is_refused(changes, field, remedy):
    with pytest.raises((SpecError, InvalidFieldsError)) as raised:
        dataset_of(**changes)
    message = str(raised.value)
    assert field in message
    assert remedy in message
    assert "secret@" not in message or changes["uri"] in message


@pytest.mark.parametrize(
    ("settings", "is_topic", "field"),
    [
        ({"until": "_END"}, True, "until"), ({"settle_seconds": 3}, True, "settle_seconds"),
        ({"late": "refuse"}, True, "late"), ({"start": "latest"}, False, "start"),
        ({"away_seconds": 3}, False, "away_seconds"),
    ],
)  # fmt: skip
def test_what_is_of_folders_alone_or_of_topics_alone_is_refused(settings, is_topic, field):
    dataset = dataset_of() if is_topic else dataset_of(uri="rows", messages=None)
    with pytest.raises(InvalidFieldsError, match=rf"dataset.follow.{field}: it is for a .*leave it out"):
        following(**settings).against(dataset)


def test_a_topic_is_for_jobs_that_follow_it_alone():
    for job in (job_of(), job_of(one_pass=False, tables={})):
        with pytest.raises(
            InvalidFieldsError, match=r"dataset.follow: .*which has no end.*set it, and dataset.one_pass: true"
        ):
            job.against(dataset_of())
    with pytest.raises(DataError, match=r"kafka://.*: is a topic, whose rows are read by jobs that follow it"):
        Source(URI)
    with pytest.raises(DataError, match=r"messages.columns: no column 'weight'"):
        make_plan(dataset_of(weight="weight"), following())
    for start in ("yesterday", "2026-11-25T09:00:00"):
        with pytest.raises(SpecError, match="is neither earliest, latest nor a time with its zone"):
            parse_job({"name": "a", "model": {"kind": "dnn"}, "dataset": {"name": "log", "follow": {"start": start}}})
