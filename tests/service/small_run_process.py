"""A real process in the place of ``trainer.launch.entrypoint``: it speaks the run's event file, and behaves as the
job's label
``behave`` says. Needs neither torch nor Ray, so that the control plane's tests are quick.

succeed | fail | retryable | die (kill -9 of itself, first attempt only) | always_die | hang (until SIGTERM) |
stubborn (ignores SIGTERM) | slow (0.1 s an epoch) | told (slow, until a file ``finish`` is there, past its epochs) |
held | stall (first attempt: evaluates for a while, then takes no further step; its driver beats on)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from embeddings.durable_files import write_json
from trainer.runs import run_process
from trainer.runs.events import EventWriter
from trainer.runs.protocol import EXIT_CANCELLED, EXIT_FILE, EXIT_RETRYABLE

EVALUATION_SECONDS = 5.0


def beat(events: EventWriter, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        events.write("heartbeat")
        time.sleep(0.1)


def main(directory: Path) -> int:
    if not run_process.await_name(directory):
        return EXIT_RETRYABLE
    run = json.loads((directory / "run.json").read_text())
    attempt, job = run["attempt"], run["job"]
    behave = job["labels"].get("behave", "succeed")
    events = EventWriter(directory, attempt)

    def end(state: str, retryable: bool = False) -> int:
        events.write("state", state=state)
        time.sleep(0.1)  # the gap in which the control plane must wait for exit.json
        write_json(directory / EXIT_FILE, {"attempt": attempt, "state": state, "retryable": retryable})
        return 0

    def stop(number: int, frame: object) -> None:
        if behave != "stubborn":
            end("cancelled")
            os._exit(EXIT_CANCELLED)

    signal.signal(signal.SIGTERM, stop)
    print(f"attempt {attempt} begins", flush=True)
    events.write("state", state="starting")
    events.write("state", state="running")
    epochs = job["epochs"]
    # "told" ends by itself too, in ten minutes: who was to tell it may be gone.
    for epoch in range(1, 1 + (6000 if behave == "told" else epochs)):
        events.write("progress", epoch=epoch, epochs=epochs, step=epoch * 10, examples=100, examples_per_second=5.0)
        events.write("metric", epoch=epoch, split="validation", auc=0.7 + 0.01 * epoch, logloss=0.5)
        print(f"epoch {epoch}", flush=True)
        if behave == "always_die" or (behave == "die" and attempt == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if behave in ("slow", "told"):
            time.sleep(0.1)
        if behave == "stall" and attempt == 1:
            events.write("begin", name="evaluation")
            beat(events, EVALUATION_SECONDS)
            events.write("phase", name="evaluation", seconds=EVALUATION_SECONDS)
            beat(events, 600.0)
        if behave == "told" and (directory / "finish").exists():
            break
    if behave in ("fail", "retryable"):
        events.write("error", code="bad_data", message="row 7 is bad", remedy="correct it")
        return end("failed", behave == "retryable")
    while behave in ("hang", "stubborn"):
        time.sleep(0.05)
    if job["publish"]:
        events.write("state", state="publishing")
        status, reasons = ("held", ["cosine .3 below .85"]) if behave == "held" else ("published", [])
        collection = job["publish"]["collection"]
        # What else a publication says: of labels in JSON.
        more = json.loads(job["labels"].get("publication", "{}"))
        events.write(
            "publication", status=status, collection=collection, version="v000001", reasons=reasons, gate=[], **more
        )
    return end("succeeded")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
