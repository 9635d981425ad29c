"""What a refresh takes in memory: chunks of vectors, and for each item ids and flags, never the vectors of all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("publish_memory.py")
ROOT = Path(__file__).resolve().parents[3]
# Ids, row numbers, statuses, norms, counts and what is made of them on the way; measured: 95.
BYTES_PER_ITEM = 160


def peak_of(directory: Path, num_items: int, dim: int, mode: str, limit: int | None = None) -> int:
    directory.mkdir()
    command = [sys.executable, str(PROGRAM), str(directory), str(num_items), str(dim), mode]
    command += [] if limit is None else [str(limit)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


# With the gate both numbers are above the 50,000 items among which it looks for neighbours.
@pytest.mark.parametrize(
    ("mode", "few", "many", "dim"), [("off", 20_000, 60_000, 256), ("report", 55_000, 95_000, 128)]
)
def test_memory_grows_by_ids_and_flags_not_by_vectors(tmp_path: Path, mode: str, few: int, many: int, dim: int) -> None:
    assert 4 * dim > 3 * BYTES_PER_ITEM
    grown = peak_of(tmp_path / "many", many, dim, mode) - peak_of(tmp_path / "few", few, dim, mode)
    assert grown < BYTES_PER_ITEM * (many - few)


def test_a_refresh_runs_in_less_memory_than_its_vectors(tmp_path: Path) -> None:
    """The limit holds for everything that is allocated, in Arrow and BLAS too."""
    num_items, dim = 60_000, 256
    peak_of(tmp_path / "run", num_items, dim, "off", limit=4 * dim * num_items * 2 // 3)
