"""Downloads to one path at the same time, of a server that sends both by halves."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from service.client import AsyncClient, Client

pytestmark = pytest.mark.process

HALF = 1 << 20
CONTENTS = {version: version[-1:].encode() * 2 * HALF for version in ("v000001", "v000002")}


@pytest.fixture
def halves() -> Iterator[str]:
    """Sends no second half before both clients have had a first one."""
    both = threading.Barrier(2, timeout=120)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = CONTENTS[self.path.split("/")[-2]]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:HALF])
            both.wait()
            self.wfile.write(content[HALF:])

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def is_one_of_them(path: Path) -> bool:
    return list(path.parent.iterdir()) == [path] and path.read_bytes() in CONTENTS.values()


def test_two_downloads_to_one_path_do_not_mix(halves: str, tmp_path: Path) -> None:
    target = tmp_path / "items.parquet"
    with Client(halves, "k") as client, ThreadPoolExecutor() as pool:
        downloads = [pool.submit(client.snapshot, "items", target, version) for version in CONTENTS]
        assert [download.result() for download in downloads] == [target, target]
    assert is_one_of_them(target)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_nor_do_those_of_an_asynchronous_client(halves: str, tmp_path: Path) -> None:
    target = tmp_path / "items.parquet"
    async with AsyncClient(halves, "k") as client:
        await asyncio.gather(*(client.snapshot("items", target, version) for version in CONTENTS))
    assert is_one_of_them(target)
