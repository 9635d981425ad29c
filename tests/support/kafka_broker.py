"""A broker that speaks Kafka's protocol over TCP: librdkafka's own, in a process that outlives its readers.

Or, where EVENKEEL_TEST_KAFKA names one (HOST:PORT), another broker that runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic


class Broker:
    """What tests do with a broker. A topic has a name of its own each time."""

    def __init__(self, address: str):
        self.address = address
        self._admin: Any = AdminClient({"bootstrap.servers": address})

    def topic(self, partitions: int = 2) -> str:
        name = f"log-{uuid4().hex[:12]}"
        (made,) = self._admin.create_topics([NewTopic(name, partitions, 1)]).values()
        made.result(20)
        return name

    def uri(self, topic: str) -> str:
        return f"kafka://{self.address}/{topic}"

    def send(self, topic: str, partition: int, values: list[bytes | None]) -> None:
        """Returns when the broker has them."""
        failed: list[Any] = []
        # One in each batch: there are brokers that tell of a batch's first message alone where one asks for the end.
        producer = Producer({"bootstrap.servers": self.address, "batch.num.messages": 1})
        for value in values:
            producer.produce(topic, value, partition=partition, on_delivery=lambda error, _: failed.append(error))
        assert producer.flush(20) == 0
        assert not any(failed)

    def grow(self, topic: str, partitions: int) -> None:
        (grown,) = self._admin.create_partitions([NewPartitions(topic, partitions)]).values()
        grown.result(20)


class OwnBroker(Broker):
    """The one that librdkafka has for tests."""

    def __init__(self, process: subprocess.Popen[str], address: str):
        super().__init__(address)
        self._process = process

    def topic(self, partitions: int = 2) -> str:
        name = f"log-{uuid4().hex[:12]}"
        self._tell(f"topic {name} {partitions}")
        return name

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """It ends connections and takes none."""
        self._tell("down")
        try:
            yield
        finally:
            self._tell("up")

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "0\n", command


@contextlib.contextmanager
def own_broker() -> Iterator[OwnBroker]:
    command = [sys.executable, "-m", "tests.support.kafka_broker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield OwnBroker(process, process.stdout.readline().strip())
        finally:
            process.kill()


def _serve() -> None:
    """Until the standard input ends."""
    files = importlib.metadata.files("confluent-kafka") or []
    (library,) = {
        str(file.locate())
        for file in files
        if file.parts[0] == "confluent_kafka.libs" and file.name.startswith("librdkafka")
    }
    rdkafka = ctypes.CDLL(library)
    for name in ("conf_new", "new", "mock_cluster_new"):
        getattr(rdkafka, f"rd_kafka_{name}").restype = ctypes.c_void_p
    rdkafka.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    configuration = ctypes.c_void_p(rdkafka.rd_kafka_conf_new())
    handle = ctypes.c_void_p(rdkafka.rd_kafka_new(0, configuration, ctypes.create_string_buffer(512), 512))
    cluster = ctypes.c_void_p(rdkafka.rd_kafka_mock_cluster_new(handle, 1))
    print(rdkafka.rd_kafka_mock_cluster_bootstraps(cluster).decode(), flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "topic":
            result = rdkafka.rd_kafka_mock_topic_create(cluster, words[0].encode(), int(words[1]), 1)
        else:
            result = getattr(rdkafka, f"rd_kafka_mock_broker_set_{command}")(cluster, 1)
        print(result, flush=True)


if __name__ == "__main__":
    _serve()
