"""Run by test_store_failures.py in processes of their own, because they kill themselves, hit limits, or race.

``python -m tests.embeddings.store.store_scenarios SCENARIO ROOT``, where SCENARIO is

- ``kill``: publishes in a forked child for each kill point i, in ROOT/i; prints the number
- ``limit`` (and a number N): publishes with RLIMIT_FSIZE = N bytes; prints what came of it
- ``race``: two processes publish on the same parent at the same moment; prints both ends
- ``read``: reads until the file ROOT/stop appears, and once more; makes the file ROOT/enough-PID when it saw ENOUGH
  versions; prints the number of reads, the last version and how many were seen
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import embeddings.store.files as store_files
from embeddings.refresh.publish import RefreshRequest, Settings, publish_candidate
from embeddings.store import StoreFull, open_store
from embeddings.vectors.item_vectors import ItemVectors

DIM = 4
NUM_ITEMS = 200
ENOUGH = 10


def vectors_of(seed: int) -> np.ndarray:
    """A refresh: the same geometry in every one, a little noise, another basis."""
    base = np.random.default_rng(0).standard_normal((NUM_ITEMS, DIM))
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0]
    return ((base + 0.05 * rng.standard_normal(base.shape)) @ basis).astype(np.float32)


def refresh(root: Path, seed: int, parent: str | None, job: str, keep_last: int = 1) -> Any:
    items = ItemVectors(np.arange(NUM_ITEMS), vectors_of(seed))
    return publish_candidate(
        open_store(root),
        "items",
        RefreshRequest(items, Settings(), job_id=job, parent_version=parent, keep_last=keep_last),
    )


def prepare(root: Path) -> None:
    """Three published versions, of which retention has expired the second."""
    for number in range(3):
        end = refresh(root, number, f"v{number:06d}" if number else None, f"job-{number}")
        assert end.status == "published", end.reasons


# --- kill ------------------------------------------------------------------------------------------------------------


def kill_at(point: int) -> None:
    """From here on, the process kills itself at its ``point``-th kill point: before and after each call that changes
    the disk, and in the middle of each write."""
    passed = 0

    def step() -> None:
        nonlocal passed
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            step()
            return function(*arguments, **options)

        return call

    for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, wrapped(getattr(os, name)))
    write = store_files.HashingFile.write

    def half_first(self: store_files.HashingFile, data: Any) -> int:
        view = memoryview(data).cast("B")
        half = len(view) // 2
        write(self, view[:half])
        step()
        write(self, view[half:])
        step()
        return len(view)

    store_files.HashingFile.write = half_first  # type: ignore[method-assign]


def kill(root: Path) -> None:
    template = root / "template"
    prepare(template)
    point = 0
    while True:
        target = root / str(point)
        shutil.copytree(template, target)
        child = os.fork()
        if child == 0:
            kill_at(point)
            status = refresh(target, 3, "v000003", "job-3").status
            os._exit(0 if status == "published" else 1)
        _, ended = os.waitpid(child, 0)
        if not os.WIFSIGNALED(ended):
            assert os.WEXITSTATUS(ended) == 0
            break
        point += 1
    print(point)


# --- the others ------------------------------------------------------------------------------------------------------


def limit(root: Path, num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    try:
        print(refresh(root, 3, "v000003", "job-3").status)
    except StoreFull as error:
        print(f"full: {error}")


def race(root: Path) -> None:
    start = time.time() + 0.3
    children = []
    for number in range(2):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            time.sleep(max(start - time.time(), 0))
            end = refresh(root, 10 + number, "v000003", f"racer-{number}", keep_last=9)
            os.write(write_end, json.dumps([end.status, end.version, end.reasons]).encode())
            os._exit(0)
        os.close(write_end)
        children.append((child, read_end))
    ends = []
    for child, read_end in children:
        os.waitpid(child, 0)
        ends.append(json.loads(os.read(read_end, 65536)))
    print(json.dumps(ends))


def read(root: Path) -> None:
    """Every vector of version N is N everywhere, so a torn or mixed read shows."""
    collection = open_store(root).collection("items")
    ids = np.arange(500)
    num_reads, latest, seen = 0, 0, set()
    print("ready", flush=True)
    stopping = False
    while not stopping:
        stopping = (root / "stop").exists()  # what was published before it is seen
        reader = collection.open()
        status, vectors = reader.lookup(ids)
        number = int(reader.version[1:])
        assert number >= latest, f"went back from {latest} to {number}"
        assert (status == 1).all()
        assert (vectors == number).all(), f"version {number} holds {np.unique(vectors)}"
        latest = number
        seen.add(number)
        num_reads += 1
        if len(seen) == ENOUGH:
            (root / f"enough-{os.getpid()}").touch()
    print(json.dumps([num_reads, latest, len(seen)]))


if __name__ == "__main__":
    scenario = {"kill": kill, "limit": limit, "race": race, "read": read}[sys.argv[1]]
    scenario(Path(sys.argv[2]), *[int(argument) for argument in sys.argv[3:]])
