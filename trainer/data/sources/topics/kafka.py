"""Reading of a Kafka topic by confluent-kafka: its offsets, and the messages between two offsets. Torch-free.

The caller gives the offsets to read: no consumer group is joined, and no offset is committed to the brokers.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainer.data.errors import DataAwayError, DataError, Stopped
from trainer.data.sources.topics.segments import Range
from trainer.spec import Follow
from trainer.spec.messages import Messages, brokers_and_topic

BLOCK_MESSAGES, BLOCK_BYTES = 8192, 1 << 25
"""Limits at which a block, a list of messages of one partition, is full."""
TELL_SECONDS = 5.0
"""Time without an answer of the brokers until their silence is reported."""
_ANSWER_SECONDS = 5.0
_SETTINGS = {
    "username": "sasl.username", "password": "sasl.password", "ca": "ssl.ca.pem",
    "certificate": "ssl.certificate.pem", "key": "ssl.key.pem", "key_password": "ssl.key.password",
}  # fmt: skip

Message = tuple[int, bytes | None]
"""Offset and value of a message; the value is None if the message has no value."""


class Ends(NamedTuple):
    """Offset of a partition's first message, and offset that its next new message will get."""

    first: int
    end: int


class KafkaTopic:
    """Connection to a topic of Kafka brokers; the caller closes it.

    ``messages`` hold the security of the connection; ``note`` is called with each message for the job's owner.

    Raises:
        DataError: the library or an environment variable is missing, or the security settings are invalid.
    """

    def __init__(self, uri: str, messages: Messages, follow: Follow, note: Callable[[str], None]):
        parts = brokers_and_topic(uri)
        assert parts is not None
        self.uri, (self.brokers, self.topic) = uri, parts
        self._follow, self._note = follow, note
        self._library = _library(uri)
        self._problem = ""
        self._refused: Any = None
        self._away_since: float | None = None
        self._is_told = False
        self._consumer = self._connect(messages)

    def close(self) -> None:
        self._consumer.close()

    def ends(self) -> dict[int, Ends] | None:
        """Return the first and end offsets by partition, in the order of partitions; None while no broker answers.

        Raises:
            DataError: the brokers refuse this run, or did not answer for ``follow.away_seconds``.
        """
        self._serve()
        try:
            found = self._consumer.list_topics(self.topic, timeout=_ANSWER_SECONDS).topics[self.topic]
            if found.error is not None:
                raise self._library.KafkaException(found.error)
            ends = {}
            for partition in sorted(found.partitions):
                one = self._library.TopicPartition(self.topic, partition)
                first, end = self._consumer.get_watermark_offsets(one, timeout=_ANSWER_SECONDS)
                ends[partition] = Ends(first, end)
        except self._library.KafkaException as error:
            self._serve()
            self._failed(error.args[0])
            return None
        if not ends:
            self._away("it has no partitions yet")
            return None
        self._answered()
        return ends

    def offsets_at(self, milliseconds: int, ends: Mapping[int, Ends]) -> dict[int, int] | None:
        """Return the offset of each partition's first message at or after a time; None while no broker answers.

        ``milliseconds`` are since 1970; without such a message, a partition's offset is its ``end``.
        """
        asked = [self._library.TopicPartition(self.topic, partition, milliseconds) for partition in ends]
        try:
            found = self._consumer.offsets_for_times(asked, timeout=_ANSWER_SECONDS)
            for one in found:
                if one.error is not None:
                    raise self._library.KafkaException(one.error)
        except self._library.KafkaException as error:
            self._failed(error.args[0])
            return None
        self._answered()
        return {one.partition: one.offset if one.offset >= 0 else ends[one.partition].end for one in found}

    def read(self, ranges: Sequence[Range], stopped: threading.Event) -> Iterator[tuple[int, list[Message]]]:
        """Yield (partition, list of messages) until all ranges are read, in order within each partition.

        The order across partitions may vary; the division into lists depends only on the messages. Offsets without a
        message (after compaction or transactions) are skipped.

        Raises:
            DataError: messages were deleted before they were read, or as in :meth:`ends`.
            Stopped: ``stopped`` was set in the meantime.
        """
        library = self._library
        waiting = {one.partition: one for one in ranges if one.end > one.first}
        held: dict[int, list[Message]] = {partition: [] for partition in waiting}
        sizes = dict.fromkeys(waiting, 0)
        self._consumer.assign(
            [library.TopicPartition(self.topic, one.partition, one.first) for one in waiting.values()]
        )
        heard = time.monotonic()
        while waiting:
            if stopped.is_set():
                raise Stopped
            came = self._consumer.consume(1000, timeout=0.1)
            self._raise_refused()
            is_heard = False
            for message in came:
                error, partition = message.error(), message.partition()
                if error is not None and error.code() != library.KafkaError._PARTITION_EOF:
                    self._read_failed(error, message, waiting)
                    continue
                if partition not in waiting or message.offset() < waiting[partition].first:
                    continue
                is_heard = True
                offset, end = message.offset(), waiting[partition].end
                if error is None and offset < end:
                    value = message.value()
                    held[partition].append((offset, value))
                    sizes[partition] += len(value or b"")
                if offset >= end - (error is None):
                    del waiting[partition]
                    self._consumer.incremental_unassign([library.TopicPartition(self.topic, partition)])
                elif len(held[partition]) < BLOCK_MESSAGES and sizes[partition] < BLOCK_BYTES:
                    continue
                yield partition, held[partition]
                held[partition], sizes[partition] = [], 0
            if is_heard:
                heard = time.monotonic()
                self._answered()
            elif time.monotonic() - heard > 1.0:
                self._away(self._problem or "no message came")
        self._consumer.unassign()

    def _connect(self, messages: Messages) -> Any:
        settings: dict[str, Any] = {
            "bootstrap.servers": self.brokers,
            "client.id": "evenkeel",
            "group.id": "evenkeel",  # required by the library
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "allow.auto.create.topics": False,
            "queued.max.messages.kbytes": 1 << 14,
            "reconnect.backoff.max.ms": 2000,
            "security.protocol": messages.security.protocol,
            "error_cb": self._on_error,
            "log_level": 0,  # the library would repeat the same lines on stderr for each connection that it tries
        }
        if messages.security.protocol.startswith("sasl"):
            settings["sasl.mechanism"] = messages.security.mechanism
        for field, variable in messages.security.variables.items():
            if not os.environ.get(variable):
                raise DataError(
                    f"the environment variable {variable} is not set",
                    where=f"{self.uri}, messages.security.{field}",
                    remedy="set it where the job runs: where the service does, or in the pods of the cluster",
                )
            settings[_SETTINGS[field]] = os.environ[variable]
        try:
            return self._library.Consumer(settings)
        except self._library.KafkaException as error:
            raise DataError(
                f"no connection is possible: {error.args[0].str()}", where=self.uri, remedy="correct messages.security"
            ) from None

    def _on_error(self, error: Any) -> None:
        self._problem, codes = error.str(), self._library.KafkaError
        refusals = codes._AUTHENTICATION, codes.SASL_AUTHENTICATION_FAILED, codes.TOPIC_AUTHORIZATION_FAILED
        if error.code() in refusals:
            self._refused = error

    def _serve(self) -> None:
        """Let the library call its error callback, and raise if the brokers refused this run."""
        self._consumer.poll(0)
        self._raise_refused()

    def _raise_refused(self) -> None:
        if self._refused is not None:
            raise DataError(
                f"the brokers refuse this run: {self._refused.str()}",
                where=self.uri,
                remedy="see messages.security, the variables that it names, and who may read the topic",
            )

    def _failed(self, error: Any) -> None:
        self._on_error(error)
        self._raise_refused()
        self._away(error.str())

    def _read_failed(self, error: Any, message: Any, waiting: Mapping[int, Range]) -> None:
        codes = self._library.KafkaError
        if error.code() in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
            there = waiting.get(message.partition())
            offset = message.offset() if there is None else max(there.first, message.offset())
            raise gone(self.uri, message.partition(), offset, error.str())
        self._failed(error)

    def _away(self, problem: str) -> None:
        """Report once that the brokers do not answer; raise after ``follow.away_seconds``."""
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        limit, seconds = self._follow.away_seconds, now - self._away_since
        if seconds > limit:
            raise DataAwayError(
                f"the brokers did not answer for {limit:g} seconds: {problem}",
                where=self.uri,
                remedy="the job is tried again from its checkpoint; check that the brokers run and the topic exists",
            )
        if not self._is_told and seconds > min(TELL_SECONDS, limit / 2):
            self._is_told = True
            self._note(f"{self.uri}: the brokers do not answer ({problem}); waiting for up to {limit:g} seconds")

    def _answered(self) -> None:
        if self._is_told:
            self._note(f"{self.uri}: the brokers answer again")
        self._away_since, self._is_told, self._problem = None, False, ""


def gone(uri: str, partition: int, offset: int, why: str) -> DataError:
    """Return the error for messages that the brokers have deleted."""
    return DataError(
        f"messages from offset {offset} on are gone before they were read: {why}",
        where=f"{uri}, partition {partition}",
        remedy="start a new job, with dataset.follow.start for the messages and init_from: {job: ...} for the model; "
        "let the topic keep its messages for longer (retention.ms, retention.bytes) than a job may be away",
    )


def _library(uri: str) -> Any:
    try:
        return importlib.import_module("confluent_kafka")
    except ImportError as error:
        raise DataError(
            f"is a topic of Kafka, and {error}", where=uri, remedy="pip install 'evenkeel[kafka]' where jobs run"
        ) from None
