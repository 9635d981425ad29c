"""Segments of topics: what is read next, after a restart too; messages and brokers that are not there."""

from __future__ import annotations

import datetime
import itertools
import threading
import time

import pytest
from confluent_kafka import KafkaException

from tests.support.kafka_broker import OwnBroker
from tests.trainer.data.sources.topics.conftest import MESSAGES, values
from trainer.data.errors import DataAwayError, DataError, Stopped
from trainer.data.sources.topics import followed_topic, kafka
from trainer.data.sources.topics.kafka import KafkaTopic
from trainer.data.sources.topics.segments import Journal, Range, Segment
from trainer.data.sources.topics.topic_source import SegmentRows
from trainer.spec import Follow, parse_dataset
from trainer.spec.messages import Messages


def segments(topic, number=0):
    """All that are there from ``number`` on."""
    found = []
    for one in itertools.count(number):
        segment = topic.next(one)
        if segment is None:
            return found
        found.append(segment)
    raise AssertionError


def await_ends(topic, *ends):
    """Until the brokers tell of all messages."""
    while (there := topic._kafka.ends()) is None or [one.end for one in there.values()] != list(ends):
        time.sleep(0.02)


def await_next(topic, number):
    while (segment := topic.next(number)) is None:
        pass
    return segment


def rows_of(uri, segment, messages=MESSAGES):
    """(partition, offset, value) of its rows, and what could not be read."""
    dataset = parse_dataset({"name": "log", "uri": uri, "messages": messages.model_dump(),
                             "features": {"a": {"type": "id"}}, "label": {"column": "a"}})  # fmt: skip
    rows = SegmentRows(dataset, Follow(), print)
    chunks = list(rows.chunks(segment, ["a"], threading.Event()))
    rows.close()
    found = [(chunk.partition, chunk.offset_of(n), row["a"]) for chunk in chunks
             for n, row in enumerate(chunk.batch.to_pylist())]  # fmt: skip
    assert [n for chunk in chunks for n in chunk.rows] == list(range(len(found)))
    return found, [(chunk.partition, *problem) for chunk in chunks for problem in chunk.problems]


def test_what_is_there_is_read_partition_by_partition_and_again_alike(broker, following, notes, monkeypatch, tmp_path):
    """In segments of as many messages of each; what an earlier attempt had decided on comes first, whatever came."""
    monkeypatch.setattr(followed_topic, "SEGMENT_MESSAGES", 6)
    topic = broker.topic(3)
    uri = broker.uri(topic)
    broker.send(topic, 0, values(*range(5)))
    broker.send(topic, 2, [*values(10), b"no", None, *values(11)])
    first = following(uri)
    await_ends(first, 5, 0, 4)
    found = segments(first)
    assert [one.ranges for one in found] == [((0, 0, 3), (2, 0, 3)), ((0, 3, 5), (2, 3, 4))]
    assert found[-1].offsets == ((0, 5), (1, 0), (2, 4))
    assert notes == [f"{uri}: reading begins at the offsets {{0: 0, 1: 0, 2: 0}}"]
    rows, problems = rows_of(uri, found[0])
    assert rows == [(0, 0, 0), (0, 1, 1), (0, 2, 2), (2, 0, 10)]
    assert [one[:2] for one in problems] == [(2, 1)]
    assert rows_of(uri, found[1])[0] == [(0, 3, 3), (0, 4, 4), (2, 3, 11)]
    broker.send(topic, 1, values(20))
    with (tmp_path / "segments.jsonl").open("ab") as file:
        file.write(b'{"number": 2, "ranges": [[0, 5')  # torn
    again = following(uri)
    await_ends(again, 5, 1, 4)
    assert segments(again) == [*found, Segment(2, (Range(1, 0, 1),), ((0, 5), (1, 1), (2, 4)))]
    # A checkpoint is enough, where the file is on another host: what it names is read alike.
    kept = again.pieces_until(1)
    assert [one.number for one in kept] == [0, 1, 2]
    elsewhere = following(uri, None)
    elsewhere.begin(kept)
    assert segments(elsewhere, 1) == segments(again, 1)
    assert elsewhere.figures(1) == {"messages_behind": 1, "seconds_behind": pytest.approx(0, abs=60)}


def test_what_another_host_has_gone_on_from_is_not_gone_on_with(own_broker, following, monkeypatch, tmp_path):
    """Hosts do not share the journal: on one the segments lie that it decided on before the other went on."""
    monkeypatch.setattr(followed_topic, "SEGMENT_MESSAGES", 2)
    topic = own_broker.topic(2)
    uri, here = own_broker.uri(topic), tmp_path / "here.jsonl"
    first = following(uri, here)
    for number in range(3):
        own_broker.send(topic, 0, values(number))
        await_ends(first, number + 1, 0)
        assert first.next(number).ranges == ((0, number, number + 1),)
    own_broker.send(topic, 1, values(10))
    elsewhere = following(uri, tmp_path / "there.jsonl")
    elsewhere.begin(first.pieces_until(0)[:2])
    await_ends(elsewhere, 3, 1)
    taken = elsewhere.next(1)
    assert taken.ranges == ((0, 1, 2), (1, 0, 1))
    again = following(uri, here)
    again.begin(elsewhere.pieces_until(1))
    assert sorted(Journal(here).read()) == [-1, 0, 1]
    await_ends(again, 3, 1)
    assert again.next(2) == Segment(2, (Range(0, 2, 3),), ((0, 3), (1, 1)))


def test_the_journal_is_read_once_however_often_it_looks(own_broker, following, monkeypatch):
    topic = own_broker.topic(1)
    reader = following(own_broker.uri(topic))
    assert reader.next(0) is None
    monkeypatch.setattr(Journal, "read", lambda self: pytest.fail("read again"))
    own_broker.send(topic, 0, values(1))
    await_ends(reader, 1)
    assert len(segments(reader)) == 1


def test_partitions_that_are_added_are_read_from_their_beginning(broker, following, notes):
    """librdkafka's own broker has them from the start, and what was read knows of the first one alone."""
    has_both = isinstance(broker, OwnBroker)
    topic = broker.topic(2 if has_both else 1)
    broker.send(topic, 0, values(1, 2))
    reader = following(broker.uri(topic), start="latest")
    reader.begin([Segment(-1, (), ((0, 0),)), Segment(0, (Range(0, 0, 1),), ((0, 1),))])
    if not has_both:
        try:
            broker.grow(topic, 2)
        except KafkaException as error:
            pytest.skip(f"no Kafka broker at EVENKEEL_TEST_KAFKA that adds partitions: {error}")
    broker.send(topic, 1, values(3))
    await_ends(reader, 2, 1)
    assert segments(reader, 1) == [Segment(1, (Range(0, 1, 2), Range(1, 0, 1)), ((0, 2), (1, 1)))]
    assert f"{broker.uri(topic)}: partitions 1 were added, and are read from their beginning" in notes


def test_a_job_begins_where_it_is_told_to(broker, following):
    topic = broker.topic(1)
    uri = broker.uri(topic)
    broker.send(topic, 0, values(1, 2))
    latest = following(uri, None, start="latest")
    await_ends(latest, 2)
    assert segments(latest) == []
    hour_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    asked = following(uri, None, start=hour_ago.isoformat())._kafka
    assert asked.offsets_at(round(hour_ago.timestamp() * 1000), asked.ends()) in ({0: 0}, {0: 2})
    broker.send(topic, 0, values(3))
    await_ends(latest, 3)
    assert [one.ranges for one in segments(latest)] == [((0, 2, 3),)]


def test_messages_that_are_gone_are_refused(own_broker, following):
    """This broker keeps 5 MB of each partition. Those of one that was added are read from offset 0 on too."""
    topic = own_broker.topic(1)
    uri = own_broker.uri(topic)
    own_broker.send(topic, 0, [b"x" * 900_000] * 8)
    reader = following(uri)
    reader.begin([Segment(-1, (), ((0, 0),))])
    with pytest.raises(DataError, match=r"partition 0: messages from offset 0 on are gone.*first.*is 3 .*follow.start"):
        reader.next(0)
    two = own_broker.topic(2)
    own_broker.send(two, 1, [b"x" * 900_000] * 8)
    added = following(own_broker.uri(two))
    added.begin([Segment(-1, (), ((0, 0),))])
    with pytest.raises(DataError, match=r"partition 1: messages from offset 0 on are gone.*first.*is 3 "):
        added.next(0)
    with pytest.raises(DataError, match=r"partition 0: messages from offset 0 on are gone before they were read"):
        rows_of(uri, Segment(0, (Range(0, 0, 8),), ()))


@pytest.mark.parametrize(
    ("offsets", "what"),
    [(((0, 9),), "partition 0: .*it ends at offset 1, and 9 comes next"),
     (((0, 1), (4, 2)), "partition 4: .*it is not there any more, and offset 2 comes next")],
)  # fmt: skip
def test_another_topic_of_the_name_is_refused(own_broker, following, offsets, what):
    topic = own_broker.topic(1)
    own_broker.send(topic, 0, values(1))
    reader = following(own_broker.uri(topic))
    reader.begin([Segment(4, (), offsets)])
    with pytest.raises(DataError, match=f"{what}.*start a new job"):
        reader.next(5)


def test_brokers_that_are_away_are_waited_for_and_then_end_the_attempt(own_broker, following, notes, monkeypatch):
    """While it looks for messages, and while it reads."""
    monkeypatch.setattr(kafka, "TELL_SECONDS", 0.1)
    monkeypatch.setattr(kafka, "_ANSWER_SECONDS", 0.3)
    topic = own_broker.topic(1)
    uri = own_broker.uri(topic)
    own_broker.send(topic, 0, values(1, 2))
    reader = following(uri, away_seconds=60)
    hasty = following(uri, None, away_seconds=1.0)
    told: list[str] = []
    reads = KafkaTopic(uri, MESSAGES, Follow(away_seconds=60), told.append)
    assert reader.next(0) is not None
    with own_broker.away():
        while not notes[1:]:
            assert reader.next(1) is None
        assert "the brokers do not answer (" in notes[1]
        assert "; waiting for up to 60 seconds" in notes[1]
        with pytest.raises(DataAwayError, match="the brokers did not answer for 1 seconds"):
            await_next(hasty, 0)
        stopped, found = threading.Event(), []
        thread = threading.Thread(target=lambda: found.extend(reads.read([Range(0, 0, 2)], stopped)))
        thread.start()
        while not told:
            time.sleep(0.05)
    own_broker.send(topic, 0, values(3))
    thread.join()
    assert [(partition, [offset for offset, _ in messages]) for partition, messages in found] == [(0, [0, 1])]
    assert await_next(reader, 1).ranges == ((0, 2, 3),)
    assert notes[-1] == told[-1] == f"{uri}: the brokers answer again"
    stopped.set()
    with pytest.raises(Stopped):
        list(reads.read([Range(0, 2, 3)], stopped))
    reads.close()


def test_a_topic_that_cannot_be_opened_is_refused_by_name(own_broker, following, notes, monkeypatch):
    uri = own_broker.uri("nowhere")
    monkeypatch.setattr(kafka, "TELL_SECONDS", 0.0)
    reader = following(uri.replace("nowhere", "no-such-topic"), None)
    secret = Messages(columns={"a": "int64"}, security={
        "protocol": "sasl_plaintext", "username": "EVENKEEL_KAFKA_U", "password": "EVENKEEL_KAFKA_P"})  # fmt: skip
    monkeypatch.setenv("EVENKEEL_KAFKA_U", "someone")
    with pytest.raises(DataError, match=r"security.password: the environment variable EVENKEEL_KAFKA_P is not set"):
        following(uri, messages=secret)
    broken = Messages(columns={"a": "int64"}, security={"protocol": "ssl", "ca": "EVENKEEL_KAFKA_CA"})
    monkeypatch.setenv("EVENKEEL_KAFKA_CA", "no certificate")
    with pytest.raises(DataError, match=r"no connection is possible: .*correct messages.security"):
        following(uri, messages=broken)
    monkeypatch.setitem(__import__("sys").modules, "confluent_kafka", None)
    with pytest.raises(DataError, match=r"is a topic of Kafka, and .*pip install 'evenkeel\[kafka\]'"):
        following(uri)
    assert reader.follow.start == "earliest"


def test_the_journal_forgets_what_no_checkpoint_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(Journal, "KEPT", 2)
    path = tmp_path / "segments.jsonl"
    journal = Journal(path)
    for number in range(25):
        journal.append(Segment(number, (), ((0, number),)))
        journal.forget_before(number)
    kept = Journal(path).read()
    assert sorted(kept) == list(range(17, 25))
    assert kept[24] == Segment(24, (), ((0, 24),))
    assert not Segment(25, (Range(0, 9, 10),), ()).goes_on_from(kept[24])
