"""A service for a benchmark: ``evenkeel serve`` over a home, stopped together with everything that it started."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.runs import run_process

EVENKEEL = Path(sys.executable).with_name("evenkeel")
START_SECONDS = 120.0


class Service(NamedTuple):
    """A running service: its address, a key with every right, and its process."""

    url: str
    key: str
    pid: int


@contextlib.contextmanager
def serving(home: Path, *options: str, **variables: str) -> Iterator[Service]:
    """Run ``evenkeel serve`` over ``home``; it may read data next to ``home``. ``variables``: environment variables.

    Raises:
        RuntimeError: the service did not start.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENKEEL_")}
    environment |= {"EVENKEEL_HOME": str(home), "EVENKEEL_DATA_ROOTS": str(home.parent)} | variables
    log, key = home.with_suffix(".log"), home / "admin.key"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [EVENKEEL, "serve", "--port", "0", *options], env=environment, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"Evenkeel on (http://\S+)", log.read_text())) or not key.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not start: {log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield Service(found[1], key.read_text().strip(), process.pid)
    finally:
        process.terminate()
        process.wait(60)
        for directory in (home / "runs").glob("*"):
            run_process.terminate(directory, grace_seconds=2)
