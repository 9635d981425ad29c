"""What the driver's end of the link does with what ranks hand on; the whole of it is in test_run_on_hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.launch.rank_link import DriverEnd, _take_up
from trainer.runs.directory import RUN_FILE, read_run, revoke


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
