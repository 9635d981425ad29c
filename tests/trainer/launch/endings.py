"""How an attempt ended: its states, its last file, and why it failed."""

from __future__ import annotations

import json

from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.protocol import EXIT_FAILED, EXIT_FILE, EXIT_RETRYABLE


def states(events) -> list[str]:
    return [event["state"] for event in events]


def exit_of(run) -> dict:
    return json.loads((run.directory / EXIT_FILE).read_text())


def fails_with(run, small, code: str, *, exit_code: int = EXIT_FAILED) -> dict:
    assert execute(run, start_ranks) == exit_code
    (error,) = small.events(run.directory, "error")
    assert error["code"] == code
    assert error["remedy"]
    assert states(small.events(run.directory, "state"))[-1] == "failed"
    document = exit_of(run)
    assert document["code"] == exit_code
    assert document["retryable"] == (exit_code == EXIT_RETRYABLE)
    assert document["error"]["code"] == code
    return error
