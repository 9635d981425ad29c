"""An HTTP server that keeps what is posted to it: the place of a collector of OpenTelemetry or OpenLineage."""

from __future__ import annotations

import contextlib
import gzip
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Post(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """``posts`` are in the order of their coming; each is answered with ``status``."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.posts: queue.Queue[Post] = queue.Queue()
        self.url = ""

    def next(self, path: str, seconds: float = 60.0) -> Post:
        """The next post to ``path``; those to others are dropped."""
        while True:
            post = self.posts.get(timeout=seconds)
            if post.path == path:
                return post


@contextlib.contextmanager
def receiving(status: int = 200) -> Iterator[Receiver]:
    """A receiver on a free port of this host."""
    receiver = Receiver(status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.posts.put(Post(self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
