"""Redis' protocol where the client's own way takes as long as the server does: packed commands, many at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.backoff import NoBackoff
from redis.retry import Retry

Client = Any
"""redis.Redis; its answers are typed as bytes or str, and here they are bytes."""

UNANSWERED_COMMANDS = 8
"""Commands per pipeline."""


class Loader:
    """Sends many commands before it asks for their answers.

    A lost connection ends the load: a server that comes back may have lost what was sent before, so there is no going
    on from there.
    """

    def __init__(self, client: Client):
        self._pool = client.connection_pool
        self._connection: Any = None
        self._num_sent = 0

    def __enter__(self) -> Loader:
        self._connection = self._pool.get_connection()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self._answers()
            else:
                self._connection.disconnect()
        finally:
            self._pool.release(self._connection)

    def send_set(self, key: str, value: bytes) -> None:
        self._send([*self._connection.pack_command("SET", key, value)])

    def _send(self, packed: list[bytes]) -> None:
        self._connection.send_packed_command(packed)
        self._num_sent += 1
        if self._num_sent >= UNANSWERED_COMMANDS:
            self._answers()

    def _answers(self) -> None:
        while self._num_sent:
            self._num_sent -= 1
            self._connection.read_response()


def ask(client: Client, command: bytes, read: Callable[[Any], Any] | None = None) -> Any:
    """Return the answer to a packed command, or what ``read`` takes from the connection.

    It goes straight over a connection, because the client's own way there takes as long as Redis does; a lost
    connection is made again, with the client's own pauses.
    """
    retry: Retry = client.get_retry() or Retry(NoBackoff(), 0)

    def once() -> Any:
        connection = client.connection_pool.get_connection()
        try:
            connection.send_packed_command([command])
            return connection.read_response() if read is None else read(connection)
        except BaseException:
            # What is on its way over this connection answers a question that nobody waits for any more.
            connection.disconnect()
            raise
        finally:
            client.connection_pool.release(connection)

    return retry.call_with_retry(once, lambda error: None)
