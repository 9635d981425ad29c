"""Memory follows chunks, and distinct ids up to a limit: much is prepared where the operating system gives little."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS, NUM_IDS, NUM_NUMBERS, CHUNK = 1_000_000, 6, 3, 1 << 14
LIMIT = 48 << 20
"""Bytes beyond what the process had: less than the columns take (72 MB), and many times a chunk."""
LIMIT_OF_TASKS = 64 << 20
"""As LIMIT: a task and the process that leads are one here, with the threads of both."""
STACK_KIB = 512
MANY_IDS = 1_500_000
LIMIT_OF_IDS = 280 << 20
"""As LIMIT. With runs on disk less than 200 MiB do, and in memory 360 do not."""

PREPARE = """
import resource, sys
from pathlib import Path
import pyarrow as pa
from trainer.data.columns import numeric
from trainer.data.prepare import drift, encode, examples, numbers, table_rows
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.source import Source
from trainer.spec import load_documents

Source.stream.__defaults__ = (int(sys.argv[4]),)
examples.CHUNK_ROWS = table_rows._PIECE_ROWS = numbers._PIECE_VALUES = int(sys.argv[4])
numeric._PIECE_ROWS = drift._SAMPLE_ROWS = int(sys.argv[4])
encode.IDS_BYTES = int(sys.argv[5])
folder = Path(sys.argv[1])
hosts = None
if sys.argv[6] == "tasks":
    pa.set_io_thread_count(1)
    from tests.trainer.data.prepare.test_by_tasks import HostsHere
    from trainer.data.prepare.by_tasks import assembly, stages

    assembly.SPAN_ROWS, stages.CHUNK_ROWS = 4 * int(sys.argv[4]), int(sys.argv[4])
    hosts = HostsHere(folder / "tasks")
for name in ("few", "many"):
    dataset, job = load_documents(folder / f"{name}.yaml")
    if name == "many":
        status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        had = int(status["VmData"].split()[0]) << 10
        # Private memory alone: what is memory-mapped from files is the operating system's to give and take.
        resource.setrlimit(resource.RLIMIT_DATA, (had + int(sys.argv[3]),) * 2)
    data = prepare(dataset, job, folder / f"prepared-{name}", threads=int(sys.argv[2]), hosts=hosts)
    if name == "many" and hosts is not None:
        assert len(hosts.performed) > 40, hosts.performed
print(sum(data.num_examples.values()))
"""


def write(folder: Path, name: str, num_rows: int) -> None:
    rng = np.random.default_rng(0)
    write_columns(folder, name, {f"f{n}": rng.integers(0, 1000, num_rows) for n in range(NUM_IDS)})


def write_columns(folder: Path, name: str, columns: dict[str, Any]) -> None:
    rng, num_rows = np.random.default_rng(0), len(columns["f0"])
    features = "".join(f"  {name}: {{type: id}}\n" for name in columns)
    columns |= {f"n{n}": rng.random(num_rows) for n in range(NUM_NUMBERS)}
    columns["click"] = rng.integers(0, 2, num_rows).astype(np.int8)
    pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=CHUNK)
    features += "".join(f"  n{n}: {{type: dense, transform: log1p}}\n" for n in range(NUM_NUMBERS))
    (folder / f"{name}.yaml").write_text(
        f"name: rows\nuri: {folder / name}.parquet\nfeatures:\n{features}label: {{column: click}}\n---\n"
        "name: job\ndataset: {name: rows}\nmodel: {kind: dcnv2}\n"
    )


def prepared(
    folder: Path, limit: int, threads: int, chunk: int = CHUNK, ids_bytes: int = 1 << 29, by: str = "process"
) -> subprocess.CompletedProcess[str]:
    numbers = (threads, limit, chunk, ids_bytes)
    # Stacks of threads count as private memory, used or not, and how many Arrow begins is a matter of timing.
    small_stacks = ["sh", "-c", f'ulimit -s {STACK_KIB} && exec "$@"', "sh"]
    command = [*small_stacks, sys.executable, "-c", PREPARE, str(folder), *map(str, numbers), by]
    # Arrow's own allocator takes memory from the operating system in large pieces, used or not.
    environment = os.environ | {
        "EVENKEEL_CACHE": str(folder / "cache"),
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "MALLOC_ARENA_MAX": "1",
    }
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True)


@pytest.mark.process
def test_many_rows_are_prepared_in_the_memory_of_a_few_chunks(tmp_path):
    write(tmp_path, "few", CHUNK)
    write(tmp_path, "many", ROWS)
    done = prepared(tmp_path, LIMIT, threads=2)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == ROWS
    # Rows held at once would meet the limit. What of Arrow, numpy or a thread then fails, and how, is theirs.
    for limit, held in ((LIMIT, False), (1 << 40, True)):
        (tmp_path / "prepared-many" / "prepared.json").unlink(missing_ok=True)
        at_once = prepared(tmp_path, limit, threads=2, chunk=ROWS)
        assert (at_once.returncode == 0) == held, at_once.stderr
    (tmp_path / "prepared-many" / "prepared.json").unlink()
    by_tasks = prepared(tmp_path, LIMIT_OF_TASKS, threads=2, by="tasks")
    assert by_tasks.returncode == 0, by_tasks.stderr


@pytest.mark.process
def test_more_ids_than_fit_are_sorted_on_disk(tmp_path):
    """Ids of 24 bytes: beside them, coded in memory, their hash table and a copy meet the limit."""
    numbers = np.random.default_rng(0).permutation(MANY_IDS)
    for name, num_rows in (("few", CHUNK), ("many", MANY_IDS)):
        write_columns(tmp_path, name, {"f0": [f"{number:024d}" for number in numbers[:num_rows].tolist()]})
    for ids_bytes, fits in ((4 << 20, True), (1 << 40, False)):
        (tmp_path / "prepared-many" / "prepared.json").unlink(missing_ok=True)
        done = prepared(tmp_path, LIMIT_OF_IDS, threads=1, ids_bytes=ids_bytes)
        assert (done.returncode == 0) == fits, done.stderr
