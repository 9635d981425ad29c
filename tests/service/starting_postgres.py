"""What a PostgreSQL says that starts up, stops or recovers: it takes connections, and refuses each of them."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator

_WANTS_TLS = struct.pack("!I", 80877103)
_FIELDS = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0"


def refuse(connection: socket.socket) -> None:
    """Answers the startup message with FATAL 57P03, and ends the connection."""
    with contextlib.suppress(OSError, struct.error), connection, connection.makefile("rb") as sent:
        while True:
            (length,) = struct.unpack("!I", sent.read(4))
            if not sent.read(length - 4).startswith(_WANTS_TLS):
                break
            connection.sendall(b"N")
        connection.sendall(b"E" + struct.pack("!I", 4 + len(_FIELDS)) + _FIELDS)


class _Refusal(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        refuse(self.request)


@contextlib.contextmanager
def starting_postgres() -> Iterator[str]:
    """The URL of a database that answers so."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Refusal) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"postgresql+asyncpg://none@127.0.0.1:{server.server_address[1]}/none"
        finally:
            server.shutdown()
            thread.join()
