"""A proxy before a real HTTP server that does, once each, what networks and servers do at their worst."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_ANSWERS = {"errors": 503, "refused": 401, "missing": 404}
GOOGLE_TOKEN = "the-token-of-a-machine"


class Faults:
    """What becomes of the next requests: ``errors`` answer 503; ``lost`` are done and their answers are cut off;
    ``cut`` are ended in the middle of their answer. ``every`` is for those whose line contains it: 503, always."""

    def __init__(self) -> None:
        self.address = ""
        self.errors = self.lost = self.cut = 0
        self.every = ""
        self.seen: list[str] = []
        self._lock = threading.Lock()

    def next(self, line: str) -> str:
        with self._lock:
            self.seen.append(line)
            if self.every and self.every in line:
                return "errors"
            for kind in ("errors", "lost", "cut"):
                if getattr(self, kind):
                    setattr(self, kind, getattr(self, kind) - 1)
                    return kind
        return ""


@contextmanager
def faulty_server(behind: str, as_google: bool = False) -> Iterator[Faults]:
    """A proxy before ``behind`` (HOST:PORT). ``as_google``: behind is an S3 server, and clients speak the XML interface
    of Google Cloud Storage, which has the same paths and answers but headers of its own."""
    faults = Faults()

    def is_there(path: str, headers: dict[str, str]) -> bool:
        upstream = http.client.HTTPConnection(behind, timeout=60)
        upstream.request("HEAD", path, headers=headers)
        status = upstream.getresponse().status
        upstream.close()
        return status == 200

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            kind = faults.next(self.requestline)
            headers = {name.lower(): value for name, value in self.headers.items()}
            if as_google:
                if headers.get("authorization") != f"Bearer {GOOGLE_TOKEN}":
                    kind = "refused"
                headers["authorization"] = "AWS test:unchecked"
                if not kind and self.command == "DELETE" and not is_there(self.path, headers):
                    kind = "missing"
                if headers.pop("x-goog-if-generation-match", None) == "0":
                    headers["if-none-match"] = "*"
            if kind in _ANSWERS:
                self.send_response(_ANSWERS[kind])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            upstream = http.client.HTTPConnection(behind, timeout=60)
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            data = answer.read()
            upstream.close()
            if kind == "lost":
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            if kind == "cut":
                data = data[: len(data) // 2]
                self.close_connection = True
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    faults.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield faults
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
