"""What both ends of the link do with what ranks hand on; the whole of it, with Ray, is in test_run_on_hosts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from trainer.launch import rank_link
from trainer.launch.rank_link import DriverEnd, _RankEnd, _take_up, log_of
from trainer.runs.directory import RUN_FILE, Run, read_run, revoke
from trainer.runs.events import EventWriter, read_events


def test_each_byte_is_taken_once_and_the_answer_says_what_lies_there(make_run) -> None:
    run = make_run()
    driver = DriverEnd(str(run.directory))
    assert driver.take(0, "events.jsonl", 100, b"one\n") == (104, None, True)
    assert driver.take(0, "events.jsonl", 100, b"one\ntwo\n") == (108, None, True), "an answer was lost"
    assert driver.take(0, "events.jsonl", 108, b"") == (108, None, True)
    assert driver.take(1, "log.txt", 0, b"said\n") == (5, None, True)
    assert (run.directory / "events.jsonl").read_bytes() == b"one\ntwo\n"
    assert (run.directory / "log.txt").read_bytes() == b"said\n"
    driver.stopped("SIGTERM")
    driver.stopped("another rank was asked to stop")
    assert driver.take(1, "log.txt", 5, b"") == (5, "SIGTERM", True)
    revoke(run.directory)
    assert driver.take(1, "log.txt", 5, b"") == (5, "SIGTERM", False)
    driver.failed("rank-00001.json", b"{}")
    assert (run.failures / "rank-00001.json").read_bytes() == b"{}"


def test_an_attempt_on_a_host_takes_the_lease_of_the_one_before(
    make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "cache"))
    first, second = (make_run(f"run-{n}", attempt=n, lease={"token": str(n)}) for n in (1, 2))
    documents = [json.loads((run.directory / RUN_FILE).read_text()) | {"run_id": "run"} for run in (first, second)]
    directory = _take_up(documents[0])
    before = read_run(directory)
    assert _take_up(documents[0]) == directory, "another rank of the attempt"
    assert before.still_current()
    (before.checkpoints / ".writing-torn").mkdir(parents=True)
    assert _take_up(documents[1]) == directory
    assert not before.still_current()
    assert read_run(directory).attempt == 2
    assert list(before.checkpoints.iterdir()) == []


class _Linked(_RankEnd):
    """The end of rank 0 whose questions the driver's end answers without Ray, some of them too late."""

    def __init__(self, run: Run, driver: Run, late: int = 0):
        super().__init__(run, 0, DriverEnd(str(driver.directory)))
        self.late = late

    def _ask(self, method: str, *arguments: Any) -> Any:
        answer = getattr(self._driver, method)(*arguments)
        if self.late:
            self.late -= 1
            raise GetTimeoutError("no answer in time")
        return answer


def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "not seen within a minute"
        time.sleep(0.01)


def test_a_link_outlives_late_answers_and_a_disk_that_fails_for_a_while(
    make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_link, "SECONDS", 0.01)
    rank, driver = make_run("rank"), make_run("driver")
    link = _Linked(rank, driver, late=3)
    events = EventWriter(rank.directory)
    events.write("progress", step=1)
    link.start()
    _until(lambda: not link.late)
    log_of(rank.directory, 0).mkdir()  # reading it is an OSError
    time.sleep(0.1)
    log_of(rank.directory, 0).rmdir()
    events.write("progress", step=2)
    driver.ask_to_stop("SIGTERM")
    _until(rank.cancel_file.exists)
    link.close()
    assert [event.fields["step"] for event in read_events(driver.directory)] == [1, 2]


def test_a_line_longer_than_a_batch_is_handed_on_whole(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_link, "BATCH_BYTES", 128)
    rank, driver = make_run("rank"), make_run("driver")
    link = _Linked(rank, driver)
    events = EventWriter(rank.directory)
    for message in ("short", "x" * 1000, "last"):
        events.write("info", message=message)
    link.start()
    link.close()
    assert (driver.directory / "events.jsonl").read_bytes() == (rank.directory / "events.jsonl").read_bytes()
