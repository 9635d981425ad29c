"""The asynchronous client against a real service: it does what the other one does."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from service.client import AsyncClient, Client, ProblemError, Unreachable
from tests.service import published, serving
from tests.service.serving import Served
from tests.support.free_ports import free_port

pytestmark = [pytest.mark.process, pytest.mark.anyio]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(served.url, served.key) as client:
        yield client


def calls(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(method)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_it_has_every_call_of_the_other() -> None:
    assert calls(AsyncClient).keys() == calls(Client).keys()
    for name, signature in calls(Client).items():
        assert name == "close" or calls(AsyncClient)[name] == signature


async def test_calls_pages_vectors_and_snapshots(client: AsyncClient, served: Served, tmp_path: Path) -> None:
    await client.add_dataset(serving.dataset(served.data))
    with Client(served.url, served.key) as other:
        assert await client.datasets() == other.datasets()
        version, _ = published.publish(served.settings, users=published.users_of([1, 2]))
        several = await asyncio.gather(*(client.vectors("items", [10, number]) for number in range(20, 120, 10)))
        expected = other.vectors("items", [10, 20])
        assert {got.version for got in several} == {version}
        np.testing.assert_array_equal(several[0].vectors, expected.vectors)
        assert await client.recommend("items", [1, 2], 3) == other.recommend("items", [1, 2], 3)
        path = await client.snapshot("items", tmp_path / "items.parquet")
        assert path.read_bytes() == other.snapshot("items", tmp_path / "others.parquet").read_bytes()
    firsts = [one async for one in client.items("/audit", 1)]
    assert len(firsts) == 1


async def test_errors_are_the_same(client: AsyncClient) -> None:
    with pytest.raises(ProblemError) as caught:
        await client.job("job_none")
    assert caught.value.status == 404
    with pytest.raises(ProblemError) as caught:
        _ = [event async for event in client.events("job_none")]
    assert caught.value.status == 404
    async with AsyncClient(f"http://127.0.0.1:{free_port()}", "key") as nobody:
        with pytest.raises(Unreachable, match="no service answers"):
            await nobody.jobs()


async def test_a_job_is_followed_while_the_loop_does_other_things(client: AsyncClient, served: Served) -> None:
    await client.add_dataset(serving.dataset(served.data, "rows"))
    job_id = (await client.submit(serving.job() | {"dataset": {"name": "rows"}}))["id"]
    log = served.home / "runs" / job_id / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("epoch 1\n")
    seen: list[str] = []

    async def end() -> None:
        while not seen:
            await asyncio.sleep(0.01)
        served.set_job(job_id, state="succeeded", released=True, publication={"status": "none", "reasons": []})

    waiting = client.wait(job_id, poll_seconds=0.05, on_update=lambda job: seen.append(job["state"]))
    job, _ = await asyncio.gather(waiting, end())
    assert (seen[0], job["state"]) == ("queued", "succeeded")
    assert "".join([text async for text in client.follow_logs(job_id)]) == "epoch 1\n"
    events = [event["event"] async for event in client.events(job_id)]
    assert events[0] == "state"


async def test_a_call_that_is_cancelled_lets_go() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with AsyncClient(f"http://127.0.0.1:{silent.getsockname()[1]}", "key") as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.jobs(), 0.1)
            assert not client._client._http._transport._pool.connections
