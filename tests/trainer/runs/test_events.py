"""The event file survives what a run survives: a crash in the middle of a line, a full disk, a slow reader."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from trainer.runs.events import EVENTS_FILE, EventWriter, read_events


def kinds(run_dir: Path, offset: int = 0) -> list[str]:
    return [event.fields["type"] for event in read_events(run_dir, offset)]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, attempt=3)
    writer.write("state", state="starting")
    writer.write("metric", epoch=1, split="test", auc=0.75)
    events = [event.fields for event in read_events(tmp_path)]
    assert [event["type"] for event in events] == ["state", "metric"]
    assert events[1]["auc"] == 0.75
    assert events[1]["attempt"] == 3
    assert events[1]["time"].endswith("Z")


def test_reading_goes_on_from_an_offset(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    writer.write("heartbeat")
    first = list(read_events(tmp_path))
    writer.write("progress", step=1)
    assert kinds(tmp_path, first[-1].end) == ["progress"]


def test_half_a_line_is_left_for_later_and_never_swallows_the_next(tmp_path: Path) -> None:
    EventWriter(tmp_path).write("state", state="running")
    with open(tmp_path / EVENTS_FILE, "ab") as file:
        file.write(b'{"type":"progress","st')
    assert kinds(tmp_path) == ["state"]
    EventWriter(tmp_path).write("state", state="running")
    assert kinds(tmp_path) == ["state", "state"]


def test_a_line_that_nests_too_deep_is_skipped(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_bytes(b'{"type":"info","message":' + b"[" * 100_000 + b"\n")
    EventWriter(tmp_path).write("heartbeat")
    assert kinds(tmp_path) == ["heartbeat"]


def test_no_file_yet_is_no_event(tmp_path: Path) -> None:
    assert kinds(tmp_path / "absent") == []


def test_nan_is_refused_because_json_has_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        EventWriter(tmp_path).write("metric", auc=float("nan"))


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    threads = [
        threading.Thread(target=lambda name=name: [writer.write("info", message=name * 200) for _ in range(50)])
        for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    messages = [event.fields["message"] for event in read_events(tmp_path)]
    assert len(messages) == 200
    assert all(message == message[0] * 200 for message in messages)


@pytest.mark.process
def test_kill_leaves_whole_events(tmp_path: Path) -> None:
    code = f"""
        from trainer.runs.events import EventWriter
        writer = EventWriter({str(tmp_path)!r})
        print("ready", flush=True)
        step = 0
        while True:
            step += 1
            writer.write("progress", step=step)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    deadline = time.monotonic() + 300
    while len(kinds(tmp_path)) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    steps = [event.fields["step"] for event in read_events(tmp_path)]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("next_writer", ["writer", "other"])
@pytest.mark.process
def test_full_disk_loses_that_event_only(tmp_path: Path, next_writer: str) -> None:
    """A file size limit stops a write in the middle, as a full disk does. The driver and rank 0 write the same file."""
    code = f"""
        import resource, signal
        from trainer.runs.events import EventWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer, other = EventWriter({str(tmp_path)!r}), EventWriter({str(tmp_path)!r})
        writer.write("state", state="running")
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
        try:
            writer.write("info", message="x" * 1000)
        except OSError as error:
            print(type(error).__name__)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        {next_writer}.write("state", state="succeeded")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "OSError"
    assert [event.fields.get("state") for event in read_events(tmp_path)] == ["running", "succeeded"]
    lines = (tmp_path / EVENTS_FILE).read_bytes().splitlines()
    assert json.loads(lines[-1])["state"] == "succeeded"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 200
