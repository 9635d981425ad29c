"""An API server in this process: objects with versions, labels, owners and finalizers, watches, and faults on command.

It holds what the executor asks for (one namespace; get, list, watch, create, patch, delete, logs of pods) and checks
each object as :mod:`tests.kube.schemas` does. Who acts on objects, as KubeRay and the kubelet do, uses it by method.
"""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.kube import schemas

NAMESPACE = "evenkeel"
TOKEN = "a-token-of-the-tests"
KINDS = {
    "rayjobs": "/apis/ray.io/v1",
    "rayclusters": "/apis/ray.io/v1",
    "jobs": "/apis/batch/v1",
    "pods": "/api/v1",
    "secrets": "/api/v1",
}
Object = dict[str, Any]


class Failure(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, reason: str, message: str):
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass
class Fault:
    """What goes wrong with the next requests of a method to a resource.

    ``status`` answers with it; ``how`` is ``answer``, ``cut`` (the connection breaks off) or ``hang`` (no answer).
    ``after``: the request is done first.
    """

    method: str
    resource: str
    status: int = 500
    how: str = "answer"
    after: bool = False
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "made to fail"


class ApiServer:
    """The objects, by resource and name."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.objects: dict[tuple[str, str], Object] = {}
        self.logs: dict[str, list[tuple[str, bytes]]] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.missing: set[str] = set()
        self._version = 1000
        self._oldest = 0
        self._events: list[tuple[int, str, str, Object]] = []

    # --- what controllers use ---

    def get(self, resource: str, name: str) -> Object | None:
        with self.changed:
            return copy.deepcopy(self.objects.get((resource, name)))

    def list(self, resource: str, selector: str = "") -> list[Object]:
        wanted = dict(pair.split("=", 1) for pair in selector.split(",") if pair)
        with self.changed:
            return [
                copy.deepcopy(item)
                for (kind, _), item in sorted(self.objects.items())
                if kind == resource and wanted.items() <= item["metadata"].get("labels", {}).items()
            ]

    def create(self, resource: str, document: Object) -> Object:
        with self.changed:
            self._check(document)
            name = document["metadata"]["name"]
            if (resource, name) in self.objects:
                raise Failure(409, "AlreadyExists", f'{resource} "{name}" already exists')
            item = copy.deepcopy(document)
            if texts := item.pop("stringData", None):
                item["data"] = texts
            item["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": NAMESPACE}
            return self._store(resource, "ADDED", item)

    def change(self, resource: str, name: str, changes: Object) -> Object:
        with self.changed:
            if (found := self.objects.get((resource, name))) is None:
                raise Failure(404, "NotFound", f'{resource} "{name}" not found')
            item = _merged(found, changes)
            if "spec" in changes:
                self._check(item)
            if item["metadata"].get("deletionTimestamp") and not item["metadata"].get("finalizers"):
                return self._gone(resource, item)
            return self._store(resource, "MODIFIED", item)

    def delete(self, resource: str, name: str, propagation: str = "Background") -> Object:
        with self.changed:
            if (item := self.objects.get((resource, name))) is None:
                raise Failure(404, "NotFound", f'{resource} "{name}" not found')
            if propagation == "Orphan":
                for kind, child in self._owned(item):
                    self.change(kind, child["metadata"]["name"], {"metadata": {"ownerReferences": None}})
            if item["metadata"].get("finalizers"):
                return self.change(resource, name, {"metadata": {"deletionTimestamp": _now()}})
            return self._gone(resource, item)

    def say(self, pod: str, line: bytes) -> None:
        with self.changed:
            self.logs.setdefault(pod, []).append((f"{_now()[:-1]}.{time.time_ns() % 10**9:09d}Z", line))

    def forget_events(self) -> None:
        """Let every version that was read be too old to watch from."""
        with self.changed:
            self._version += 1
            self._oldest, self._events = self._version, []

    def _check(self, document: Object) -> None:
        try:
            schemas.validate({key: value for key, value in document.items() if key != "status"})
        except schemas.Invalid as error:
            raise Failure(422, "Invalid", str(error)) from None

    def _store(self, resource: str, event: str, item: Object) -> Object:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        if event == "DELETED":
            self.objects.pop((resource, item["metadata"]["name"]), None)
        else:
            self.objects[resource, item["metadata"]["name"]] = item
        self._events.append((self._version, resource, event, copy.deepcopy(item)))
        self.changed.notify_all()
        return copy.deepcopy(item)

    def _gone(self, resource: str, item: Object) -> Object:
        gone = self._store(resource, "DELETED", item)
        for kind, child in self._owned(item):
            with suppress(Failure):
                self.delete(kind, child["metadata"]["name"])
        return gone

    def _owned(self, owner: Object) -> list[tuple[str, Object]]:
        uid = owner["metadata"]["uid"]
        return [
            (kind, item)
            for (kind, _), item in list(self.objects.items())
            if any(one["uid"] == uid for one in item["metadata"].get("ownerReferences") or [])
        ]

    # --- what is asked over HTTP ---

    def listed(self, resource: str, selector: str) -> Object:
        with self.changed:
            return {"items": self.list(resource, selector), "metadata": {"resourceVersion": str(self._version)}}

    def watched(self, resource: str, selector: str, version: int, seconds: float) -> Iterator[Object]:
        deadline = time.monotonic() + seconds
        wanted = dict(pair.split("=", 1) for pair in selector.split(",") if pair)
        with self.changed:
            if version < self._oldest:
                raise Failure(410, "Expired", f"too old resource version: {version} ({self._oldest})")
            while True:
                for at, kind, event, item in self._events:
                    if at > version and kind == resource and wanted.items() <= item["metadata"]["labels"].items():
                        version = at
                        yield {"type": event, "object": item}
                if (left := deadline - time.monotonic()) <= 0:
                    return
                self.changed.wait(left)

    def log(self, pod: str, since: str) -> bytes:
        with self.changed:
            item = self.objects.get(("pods", pod))
            if item is None:
                raise Failure(404, "NotFound", f'pods "{pod}" not found')
            if item["status"]["phase"] == "Pending":
                raise Failure(400, "BadRequest", f'container "main" in pod "{pod}" is waiting to start')
            said = self.logs.get(pod, [])
        # As Kubernetes does it: from the second on, whatever fraction was asked for.
        return b"".join(f"{at} ".encode() + line for at, line in said if at[:19] >= since[:19])

    def fault(self, method: str, resource: str) -> Fault | None:
        with self.changed:
            self.requests.append((method, resource))
            for one in self.faults:
                if (one.method, one.resource) == (method, resource) and one.times > 0:
                    one.times -= 1
                    return one
        return None


class Handler(BaseHTTPRequestHandler):
    """One request; the server's ``api`` has the objects."""

    protocol_version = "HTTP/1.1"
    api: ApiServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PATCH = do_DELETE = do_GET

    def _serve(self) -> None:
        url = urlsplit(self.path)
        parts, query = url.path.strip("/").split("/"), dict(parse_qsl(url.query))
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        at = parts.index("namespaces") if "namespaces" in parts else -1
        resource = parts[at + 2] if 0 < at < len(parts) - 2 else ""
        method = "WATCH" if query.get("watch") else self.command
        fault = self.api.fault(method, resource)
        try:
            if fault is not None and not fault.after:
                self._fail(fault)
                return
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Failure(401, "Unauthorized", "Unauthorized")
            if resource in self.api.missing or not url.path.startswith(KINDS.get(resource, "?")):
                raise Failure(404, "NotFound", "the server could not find the requested resource")
            if parts[at + 1] != NAMESPACE:
                raise Failure(403, "Forbidden", f"{resource} is forbidden in namespace {parts[at + 1]}")
            name, rest = unquote("".join(parts[at + 3 : at + 4])), parts[at + 4 :]
            answer = self._answer(method, resource, name, rest, query, body)
        except Failure as failure:
            self._send(failure.status, _status(failure.status, failure.reason, str(failure)))
            return
        if fault is not None:
            self._fail(fault)
        elif isinstance(answer, Iterator):
            self._stream(answer)
        else:
            self._send(200 if self.command != "POST" else 201, answer)

    def _answer(
        self, method: str, resource: str, name: str, rest: list[str], query: dict[str, str], body: Object
    ) -> Any:
        api, selector = self.api, query.get("labelSelector", "")
        if method == "WATCH":
            events = api.watched(resource, selector, int(query["resourceVersion"]), float(query["timeoutSeconds"]))
            with suppress(StopIteration):
                first = next(events)
                return iter([first])
            return iter(())
        if rest == ["log"]:
            return api.log(name, query.get("sinceTime", ""))
        if method == "GET" and not name:
            return api.listed(resource, selector)
        if method == "GET":
            if (found := api.get(resource, name)) is None:
                raise Failure(404, "NotFound", f'{resource} "{name}" not found')
            return found
        if method == "POST":
            return api.create(resource, body)
        if method == "PATCH":
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            return api.change(resource, name, body)
        return api.delete(resource, name, body["propagationPolicy"])

    def _fail(self, fault: Fault) -> None:
        if fault.how == "hang":
            time.sleep(2)
        if fault.how != "answer":
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._send(fault.status, _status(fault.status, "Made", fault.message), fault.headers)

    def _send(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        with suppress(OSError):
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)

    def _stream(self, events: Iterator[Object]) -> None:
        self._send(200, b"".join(json.dumps(event).encode() + b"\n" for event in events))


@contextmanager
def api_server() -> Iterator[tuple[ApiServer, str]]:
    """Serve on a free port of this machine: the server, and its address."""
    api = ApiServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"api": api}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield api, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _status(code: int, reason: str, message: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


def _merged(item: Any, changes: Any) -> Any:
    """Merge as RFC 7396 says: null takes a field away."""
    if not isinstance(changes, dict):
        return copy.deepcopy(changes)
    found = dict(item) if isinstance(item, dict) else {}
    for key, value in changes.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = _merged(found.get(key), value)
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
