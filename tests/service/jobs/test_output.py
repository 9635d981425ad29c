"""Logs by offset, followed and streamed: characters that a limit would cut, endless lines, a log that is replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.client import Client
from service.client.http import Unreachable
from service.jobs import job_records
from service.jobs.output import STREAM_LOG_BYTES, read_log, whole_characters
from tests.service import serving
from tests.service.service_kit import job_body
from tests.service.serving import Served

TEXT = "aé漢😀"


def test_no_character_is_cut() -> None:
    data = TEXT.encode()
    for end in range(len(data) + 1):
        kept = whole_characters(data[:end])
        data[:kept].decode()  # whole
        assert end - kept < 4
        assert TEXT.startswith(data[:kept].decode())
    assert whole_characters(b"\x80" * 9) == 9, "what is no text is passed on as it is"


@pytest.mark.parametrize("shift", range(4))
def test_pieces_of_a_long_log_are_text(tmp_path: Path, shift: int) -> None:
    text = "x" * shift + "😀" * 5000
    (tmp_path / "log.txt").write_text(text)
    pieces, offset = [], 0
    while piece := read_log(tmp_path, offset, 1001):
        pieces.append(piece.decode())
        offset += len(piece)
    assert "".join(pieces) == text


async def started(app: FastAPI, client: httpx.AsyncClient) -> tuple[str, Path]:
    job = (await client.post("/v1/jobs", json=job_body())).json()["id"]
    directory = app.state.settings.run_dir(job)
    directory.mkdir()
    async with app.state.database.write() as connection:
        row = await job_records.locked(connection, job)
        await job_records.change(connection, row, state="succeeded")
    return job, directory


@pytest.mark.anyio
async def test_a_line_without_end_is_streamed_as_text(app: FastAPI, client: httpx.AsyncClient, dataset: str) -> None:
    job, directory = await started(app, client)
    text = "漢" * (STREAM_LOG_BYTES + 1) + "\nthe last line, ü"
    (directory / "log.txt").write_text(text)
    answer = await client.get(f"/v1/jobs/{job}/events")
    said: list[Any] = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    parts = [one["text"] for one in said if "text" in one]
    assert len(parts) > 2
    assert "".join(parts) == text


@pytest.mark.anyio
async def test_a_log_that_was_replaced_is_read_from_its_beginning(
    app: FastAPI, client: httpx.AsyncClient, dataset: str
) -> None:
    job, directory = await started(app, client)
    (directory / "log.txt").write_text("first attempt, with much to say\n")
    path = f"/v1/jobs/{job}/logs"
    at = (await client.get(path)).headers["evenkeel-next-offset"]
    assert (await client.get(path, params={"offset": at})).headers["evenkeel-next-offset"] == at
    events = await client.get(f"/v1/jobs/{job}/events")
    last = [line[4:] for line in events.text.splitlines() if line.startswith("id: ")][-1]
    (directory / "log.txt").write_text("second\n")
    answer = await client.get(path, params={"offset": at})
    assert (answer.text, answer.headers["evenkeel-next-offset"]) == ("", "0")
    again = await client.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": last})
    assert "second" in again.text
    (directory / "log.txt").unlink()
    assert (await client.get(path, params={"offset": at})).headers["evenkeel-next-offset"] == "0"


@pytest.mark.process
@pytest.mark.parametrize("end", ["revoked", "rotated"])
def test_a_stream_ends_with_the_key_that_reads_it(served: Served, end: str) -> None:
    with Client(served.url, served.key) as admin:
        admin.add_dataset(serving.dataset(served.data))
        job = admin.submit(serving.job())["id"]
        key = admin.create_key("reader", ["jobs:read"])
        with Client(served.url, key["key"]) as reader:
            events = reader.events(job)
            assert next(events)["data"]["state"] == "queued"
            if end == "revoked":
                admin.revoke_key(key["id"])
                assert list(events) == []
                return
            second = admin.rotate_key(key["id"])["key"]  # the first goes on, as the one before
            admin.rotate_key(key["id"], overlap_seconds=3600)
            with Client(served.url, second) as following:
                goes_on = following.events(job)
                assert next(goes_on)["data"]["state"] == "queued"
                assert list(events) == [], "of two secrets before, the older ended"
                admin.rotate_key(key["id"], overlap_seconds=0)
                assert list(goes_on) == []


class Restarted(Client):
    """Each second question finds the service away, and the log is replaced once."""

    def __init__(self, logs: list[str]):
        self._asked, self._logs = 0, logs

    def job(self, job_id: str) -> dict[str, Any]:
        self._asked += 1
        if self._asked % 2:
            raise Unreachable("http://127.0.0.1:1", "away")
        return {"state": "succeeded" if len(self._logs) == 1 else "running"}

    def logs(self, job_id: str, offset: int = 0) -> tuple[str, int]:
        text = self._logs[0]
        if offset > len(text):
            return "", 0
        if offset == len(text) and len(self._logs) > 1:
            self._logs.pop(0)
        return text[offset:], len(text)


def test_followers_wait_for_a_service_that_is_restarted() -> None:
    client = Restarted(["a long first log\n", "second\n"])
    assert list(client.follow_logs("job", poll_seconds=0.01)) == ["a long first log\n", "second\n"]
