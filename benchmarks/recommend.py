"""Top items for MovieLens-1M's users over five warm refreshes: served lists against the job's own, and latency.

    python -m benchmarks.recommend [SPEC ...] [--full] [--rows FILE] [--refreshes 5] [--epochs 2] [--folder DIR]
    python -m benchmarks.recommend --http
    python -m benchmarks.recommend --index [--items 50000] [--full]

Each spec's job is trained, and refreshed from the day before with another seed, each day on its own nine tenths of the
rows. ``ema`` is the average of the spec, or none. Lists leave out what the user had in training.
One JSON line per spec, average and day:

- ``overlap``: mean share of the job's own top 20 for a user that is served; own lists are computed from the unrotated,
  unaveraged vectors of the job's checkpoint;
- ``relevant``, ``own_relevant``: mean recall@20 of held-out positives in the served lists, and in the job's own;
- ``retained``: relevant / own_relevant.

One more line per spec with ``one_ms``: median and 95th percentile of one user's top 20 over HTTP, one request at a
time, and ``all_seconds``: all users through the client.

``--http`` trains nothing: it times 6,040 random users among 4,000 random items, and 1,000 among a million, of 64
columns with norms and biases. ``filtered_ms`` is ``one_ms`` with a filter that a tenth of the items pass.

``--index`` trains nothing: it builds the index of a large version, items around centres as benchmarks.neighbors draws
them, unit vectors with biases, and times one user's top 20 by it beside the exact search. Users are near one item, or
near the mean of two. ``share``, ``expansion``: what the builder found (embeddings.store.item_scores).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.neighbors import rows_of
from benchmarks.support.harness import interleave, line, parse, say
from embeddings.store import Collection, open_store
from embeddings.store.item_scores import ScoreIndex
from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import Array, ItemVectors, find_rows, unit_rows
from embeddings.vectors.top_k import top_k
from embeddings.vectors.user_vectors import SeenLists, UserVectors
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.launch.driver import execute
from trainer.launch.in_process import read_spec
from trainer.launch.on_host import start_ranks
from trainer.publishing.publish import candidate_of
from trainer.publishing.users import user_vectors
from trainer.runs.directory import Run, read_run, write_run
from trainer.spec import DatasetSpec, JobSpec, parse_job

SPECS = (Path("examples/ml1m.yaml"),)
ALL_SPECS = (*SPECS, Path("examples/ml1m_two_tower.yaml"), Path("examples/ml1m_sasrec.yaml"))
K = 20
REQUESTS = 300
SIZES = ((4_000, 6_040), (1_000_000, 1_000))
"""Numbers of items and of users in the collections of ``--http``."""
DIM = 64


def trained(folder: Path, job: JobSpec, dataset: DatasetSpec, day: int, before: Run | None, rows: Path) -> Run:
    """Train a day's job on nine tenths of ``rows``, from the day before if any, and publish it."""
    table = pq.read_table(rows)
    generator = np.random.default_rng(day)
    uri = folder / f"day{day}.parquet"
    pq.write_table(table.filter(generator.random(table.num_rows) < 0.9), uri)
    collection = open_store(str(folder / "store")).collection(job.publish.collection) if job.publish else None
    changes: dict[str, Any] = {"seed": day}
    if before is not None:
        changes |= {"init_from": {"job": before.run_id}, "epochs": 1}
    document = job.model_dump(mode="json", exclude_unset=True)
    directory = write_run(
        folder / f"run{day}",
        run_id=f"run{day}",
        job=parse_job({**document, **changes}),
        dataset=dataset.model_copy(update={"uri": str(uri)}),
        store_url=str(folder / "store"),
        init_checkpoint=None if before is None else str(before.checkpoints),
        parent_version=None if collection is None else collection.current(),
    )
    run = read_run(directory)
    if execute(run, start_ranks) != 0:
        raise RuntimeError(f"{job.name}: day {day} failed")
    return run


@dataclasses.dataclass(frozen=True)
class Own:
    """The job's own scores, from its checkpoint: users and items as keys, and positions of each user's seen items."""

    users: Array
    items: Array
    lists: Array

    @classmethod
    def of(cls, run: Run) -> Own:
        checkpoint = latest_valid(run.checkpoints)
        assert checkpoint is not None
        items, users = candidate_of(run, checkpoint), user_vectors(run, checkpoint)
        trained_items = np.flatnonzero(items.evidence)
        rows = unit_rows(np.asarray(items.vectors)[trained_items])[0].astype(np.float32)
        if not users.unit_items:
            rows *= items.norms[trained_items, None]
        scores = np.asarray(users.vectors) @ rows.T
        if items.biases is not None:
            scores += items.biases[trained_items]
        owners = np.repeat(np.arange(len(users)), np.diff(users.seen.starts))
        seen = find_rows(items.keys[trained_items], users.seen.items)[users.seen.positions]
        scores[owners[seen >= 0], seen[seen >= 0]] = -np.inf
        return cls(users.keys, items.keys[trained_items], items.keys[trained_items][top_k(scores, K)])


def relevant(run: Run, users: Array) -> list[set[int]]:
    """Return the held-out positives of each user: the test rows, or of a sequence model the last item."""
    data = PreparedData.open(run.data)
    found: dict[int, set[int]] = {}
    items = data.vocabulary("item").to_numpy()
    if data.sequence:
        places = data.sequences.held["test"]
        owners = np.searchsorted(data.sequences.starts, places, side="right") - 1
        pairs = zip(data.sequences.user_ids().to_numpy()[owners], data.sequences.items[places], strict=True)
        kept: Iterator[tuple[int, int]] = ((int(user), int(row)) for user, row in pairs)
    else:
        keys = {key.name: key for key in data.keys}
        positive = np.asarray(data.labels("test")) == 1
        rows = np.asarray(data.column("test", keys["user"]))[positive]
        names = data.vocabulary("user").to_numpy()
        columns = zip(rows, np.asarray(data.column("test", keys["item"]))[positive], strict=True)
        kept = ((int(names[user - 2]), int(row)) for user, row in columns if user >= 2)
    for user, row in kept:
        if row >= 2:
            found.setdefault(user, set()).add(int(items[row - 2]))
    return [found.get(int(user), set()) for user in users]


def compared(run: Run, collection: Collection) -> dict[str, Any]:
    own = Own.of(run)
    served = collection.recommender().top(own.users, K, exclude_seen=True).items
    held_out = relevant(run, own.users)
    shares = [len(set(mine.tolist()) & set(theirs)) / K for mine, theirs in zip(own.lists, served, strict=True)]
    recalls = np.array(
        [
            (len(held & set(theirs)) / min(len(held), K), len(held & set(mine.tolist())) / min(len(held), K))
            for held, mine, theirs in zip(held_out, own.lists, served, strict=True)
            if held
        ]
    ).mean(axis=0)
    return {
        "version": collection.current(), "users": len(own.users), "items": len(own.items),
        "overlap": round(float(np.mean(shares)), 4), "relevant": round(float(recalls[0]), 4),
        "own_relevant": round(float(recalls[1]), 4), "retained": round(float(recalls[0] / recalls[1]), 4),
    }  # fmt: skip


def latency(
    folder: Path, collection: str, users: npt.NDArray[Any], filter: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Time requests against a service in a process of its own, single ones with ``filter`` too if there is one."""
    import os
    import subprocess
    import sys

    from service.client import Client

    home, port = folder / "home", "18431"
    environment = {
        **os.environ, "EVENKEEL_HOME": str(home), "EVENKEEL_STORE_URL": str(folder / "store"),
        "EVENKEEL_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip
    command = [sys.executable, "-c", "from service.cli.main import app; app()", "serve", "--port", port]
    service = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (home / "admin.key").exists():
            if service.poll() is not None:
                raise RuntimeError(f"the service ended with {service.returncode} before it made its first key")
            time.sleep(0.2)
        key = (home / "admin.key").read_text().strip()
        with Client(f"http://127.0.0.1:{port}", key) as client:

            def one_by_one(filter: Mapping[str, Any] | None) -> list[float]:
                """Return the median and the 95th percentile of single requests, in milliseconds."""
                client.recommend(collection, [int(users[0])], K, exclude_seen=True, filter=filter)
                times = []
                for user in np.random.default_rng(0).choice(users, REQUESTS):
                    started = time.perf_counter()
                    client.recommend(collection, [int(user)], K, exclude_seen=True, filter=filter)
                    times.append(1000 * (time.perf_counter() - started))
                return [round(float(one), 2) for one in np.percentile(times, (50, 95))]

            found = {"one_ms": one_by_one(None)} | ({"filtered_ms": one_by_one(filter)} if filter else {})
            started = time.perf_counter()
            client.recommend(collection, users, K, exclude_seen=True)
            seconds = time.perf_counter() - started
    finally:
        service.terminate()
        service.wait()
    return {**found, "all_users": len(users), "all_seconds": round(seconds, 2)}


def random_collection(folder: Path, num_items: int, num_users: int) -> tuple[str, Array]:
    """Publish random items and users, each of whom has seen 50 items; return the collection's name and the users."""
    random = np.random.default_rng(num_items)
    vectors, norms = unit_rows(random.standard_normal((num_items, DIM)).astype(np.float32))
    biases = 0.1 * random.standard_normal(num_items).astype(np.float32)
    keys, users = np.arange(num_items), np.arange(num_users)
    had = np.sort(random.integers(0, num_items, (num_users, 50)))
    seen = SeenLists(keys, had.ravel(), np.arange(num_users + 1) * 50)
    collection = open_store(str(folder / "store")).collection(f"items{num_items}")
    items = ItemVectors(keys, vectors.astype(np.float32), norms=norms.astype(np.float32), biases=biases)
    columns = ItemColumns(keys, {"tenth": pa.array(keys % 10)})
    vectors_of_users = random.standard_normal((num_users, DIM)).astype(np.float32)
    published = UserVectors(users, vectors_of_users, seen, columns=columns)
    collection.publish(collection.write(items, users=published), None)
    return collection.name, users


def index_of(folder: Path, num_items: int, tastes: int) -> dict[str, Any]:
    """Build the index of random items and users, and time single users by it and exactly, in turns."""
    vectors = rows_of("clusters", num_items, DIM).astype(np.float32)
    random = np.random.default_rng(1)
    biases = 0.05 * random.standard_normal(num_items).astype(np.float32)
    queries = vectors[random.integers(0, num_items, (REQUESTS + 3, tastes))].mean(axis=1)
    queries += 0.1 * random.standard_normal(queries.shape).astype(np.float32)
    keys, users = np.arange(num_items), np.arange(len(queries))
    nothing = SeenLists(keys, np.empty(0, np.int64), np.zeros(len(users) + 1, np.int64))
    collection = open_store(str(folder / "store")).collection("items")
    published = UserVectors(users, queries, nothing, unit_items=True)
    collection.publish(collection.write(ItemVectors(keys, vectors, biases=biases), users=published), None)
    recommender = collection.recommender()
    started, used = time.perf_counter(), time.process_time()
    recommender.build_index(folder / "index.json")
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - used
    index = ScoreIndex(recommender.items, folder / "index.json")
    found = json.loads((folder / "index.json").read_bytes())
    asked = iter(users)
    times = interleave(
        lambda: int(next(asked)),
        lambda user: recommender.top([user], K, index=index),
        lambda user: recommender.top([user], K),
        iterations=REQUESTS,
    )
    return line(
        "recommend", f"{num_items} x {DIM}, users of {tastes}", "exact", times, **found, build_seconds=round(seconds),
        items_per_second=round(num_items / cpu_seconds),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recommend", description=__doc__)
    parser.add_argument("specs", nargs="*", type=Path)
    parser.add_argument("--rows", type=Path, help="the ratings (default: the file of each spec's dataset)")
    parser.add_argument("--refreshes", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2, help="epochs of the first day")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--ema", choices=("spec", "null", "both"), default="both")
    parser.add_argument("--http", action="store_true", help="only the latency among random items")
    parser.add_argument("--index", action="store_true", help="only the index of a large version")
    parser.add_argument("--items", type=int, default=50_000, help="number of items of --index without --full")
    options = parse(parser, arguments)
    if options.index:
        for tastes in (1, 2):
            with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                index_of(Path(scratch), 2_000_000 if options.full else options.items, tastes)
        return 0
    if options.http:
        for num_items, num_users in SIZES:
            with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                name, users = random_collection(Path(scratch), num_items, num_users)
                say({"items": num_items, "dim": DIM, **latency(Path(scratch), name, users, {"tenth": [3]})})
        return 0
    for path in options.specs or (ALL_SPECS if options.full else SPECS):
        dataset, job = read_spec(path)
        for ema in ("spec", "null") if options.ema == "both" else (options.ema,):
            with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                measure(Path(scratch), dataset, job, ema, options)
    return 0


def measure(folder: Path, dataset: DatasetSpec, job: JobSpec, ema: str, options: argparse.Namespace) -> None:
    assert job.publish is not None
    document = job.model_dump(mode="json", exclude_unset=True)
    document["publish"] |= {"users": {"feature": "user"}, "gate": {"mode": "report"}}
    document |= {"epochs": options.epochs, "resources": {"num_workers": 1}}
    if ema == "null":
        document["publish"]["ema"] = None
    job = parse_job(document)
    collection = open_store(str(folder / "store")).collection(document["publish"]["collection"])
    run = None
    for day in range(options.refreshes + 1):
        run = trained(folder, job, dataset, day, run, options.rows or Path(dataset.uri))
        say({"model": job.model.kind, "ema": ema, "day": day, **compared(run, collection)})
    if ema == "spec":
        users = np.array([int(key) for key in collection.recommender().users.keys])
        say({"model": job.model.kind, **latency(folder, collection.name, users)})


if __name__ == "__main__":
    raise SystemExit(main())
