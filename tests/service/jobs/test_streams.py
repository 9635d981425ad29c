"""Events and logs of jobs, streamed, resumed and read from an offset."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from service.core.settings import Settings
from service.jobs import output
from tests.service.service_kit import submit, wait_for

pytestmark = [pytest.mark.anyio, pytest.mark.process]


def parse(stream: str) -> list[dict[str, Any]]:
    events = []
    for block in stream.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            events.append({**fields, "data": json.loads(fields["data"])})
    return events


async def test_events_are_streamed_and_resumed(service: httpx.AsyncClient) -> None:
    job = await submit(service, "slow", epochs=4)
    path = f"/v1/jobs/{job['id']}/events"
    response = await service.get(path)  # ends when the job has
    assert response.headers["content-type"].startswith("text/event-stream")
    events = parse(response.text)
    states = [one["data"]["state"] for one in events if one["event"] == "state"]
    assert states == ["queued", "starting", "running", "succeeded"]
    assert [one["data"]["epoch"] for one in events if one["event"] == "metric"] == [1, 2, 3, 4]
    log = "".join(one["data"]["text"] for one in events if one["event"] == "log")
    assert log == (await service.get(f"/v1/jobs/{job['id']}/logs")).text
    # Whichever event a reader saw last, it gets exactly those after it.
    for index in range(len(events)):
        rest = await service.get(path, headers={"Last-Event-ID": events[index]["id"]})
        if index == len(events) - 1:
            assert rest.status_code == 204
            continue
        resumed = parse(rest.text)
        kept = [one for one in events[index + 1 :] if one["event"] in ("state", "metric")]
        assert [one for one in resumed if one["event"] in ("state", "metric")] == [
            {**one, "id": again["id"]}
            for one, again in zip(kept, [o for o in resumed if o["event"] in ("state", "metric")], strict=True)
        ]
        said = "".join(one["data"]["text"] for one in events[: index + 1] if one["event"] == "log")
        again = "".join(one["data"]["text"] for one in resumed if one["event"] == "log")
        assert said + again == log
    assert (await service.get(path, headers={"Last-Event-ID": "x"})).status_code == 422


async def test_logs_go_on_from_an_offset(service: httpx.AsyncClient, settings: Settings) -> None:
    job = await submit(service, "succeed", epochs=2)
    await wait_for(service, job["id"], "succeeded")
    path = f"/v1/jobs/{job['id']}/logs"
    whole = await service.get(path)
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.text == "attempt 1 begins\nepoch 1\nepoch 2\n"
    part = await service.get(path, params={"offset": 8})
    assert part.text == whole.text[8:]
    assert part.headers["evenkeel-next-offset"] == str(len(whole.text))
    assert (await service.get(path, params={"offset": 10**9})).text == ""
    assert (await service.get(path, params={"offset": -1})).status_code == 422
    (settings.run_dir(job["id"]) / "log.txt").write_bytes(b"x" * (output.LOG_BYTES + 5))
    long = await service.get(path)
    assert len(long.content) == output.LOG_BYTES
    rest = await service.get(path, params={"offset": long.headers["evenkeel-next-offset"]})
    assert rest.content == b"x" * 5


async def test_a_long_log_is_streamed_in_whole_lines(service: httpx.AsyncClient, settings: Settings) -> None:
    job = await submit(service, "succeed")
    await wait_for(service, job["id"], "succeeded")
    lines = [f"line {number} is ü".encode() for number in range(12_000)]
    text = b"\n".join([*lines, b"x" * (2 * output.STREAM_LOG_BYTES + 7), b"the last, unfinished"])
    (settings.run_dir(job["id"]) / "log.txt").write_bytes(text)
    events = parse((await service.get(f"/v1/jobs/{job['id']}/events")).text)
    parts = [one["data"]["text"] for one in events if one["event"] == "log"]
    assert "".join(parts).encode() == text
    assert len(parts) > 4
    assert all(part.endswith("\n") for part in parts[:2])
