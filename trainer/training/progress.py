"""Reports of rank 0 while it trains: events into the run's file, a progress bar on a terminal, lines for the log."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

from tqdm import tqdm

from trainer.runs.directory import Run
from trainer.runs.events import HEARTBEAT_SECONDS, EventWriter
from trainer.spec.evaluation import is_table


class Reporter:
    """Writes a run's events and heartbeats to its file and shows progress.

    ``emit`` is the callback of trainer.training.hooks. On ranks other than 0 it does nothing.
    """

    def __init__(self, run: Run, rank: int):
        self._events = EventWriter(run.directory, run.attempt) if rank == 0 else None
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat of rank 0", daemon=True)
        if rank == 0:
            self._write_heartbeat()  # at once: the driver beats for a rank that has never done so, even a stopped one
            self._heart.start()
        self._bar: tqdm[Any] | None = None
        self._name = run.job.name

    def emit(self, kind: str, **fields: Any) -> None:
        if self._events is None:
            return
        self._events.write(kind, **fields)
        if kind == "progress":
            self._progress(fields)
        elif kind == "metric":
            self._line(f"epoch {fields['epoch']} {fields['split']:<10} " + _figures(fields))
        elif kind == "info":
            self._line(str(fields["message"]))

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        assert self._events is not None
        with contextlib.suppress(OSError):  # a full disk must not end the thread: space may come back
            self._events.write("heartbeat", rank=0)

    def _progress(self, fields: dict[str, Any]) -> None:
        if not sys.stdout.isatty():
            return
        if self._bar is None:
            self._bar = tqdm(
                total=fields["steps"], initial=fields["step"], desc=self._name, unit="step", file=sys.stdout
            )
        self._bar.set_postfix_str(f"epoch {fields['epoch']}/{fields['epochs']}", refresh=False)
        self._bar.update(fields["step"] - self._bar.n)

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._events is not None:
            self._closed.set()
            self._heart.join()
            self._events.close()


def _figures(fields: dict[str, Any]) -> str:
    shown = {name: value for name, value in fields.items() if name not in ("epoch", "split") and not is_table(name)}
    return "  ".join(
        f"{name} {value:.5f}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
    )
