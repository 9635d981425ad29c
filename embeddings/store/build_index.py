"""``python -m embeddings.store.build_index COLLECTION VERSION IDENTITY FILE``: build an index of a version.

The index is of nearest neighbours, or with ``--scores`` of scores for the version's users. IDENTITY is its manifest's.
The store's URL is read from EVENKEEL_STORE_URL and not given as an argument, since it may hold a password.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from pathlib import Path

from embeddings.store.backend_registry import open_store
from embeddings.store.item_scores import LEAST_SHARE
from embeddings.store.nearest_neighbors import build_index


def main() -> int:
    """Build one index, unless another process is building it or the store has another version under this name."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("collection", "version", "identity"):
        parser.add_argument(name)
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scores", action="store_true")
    options = parser.parse_args()
    path: Path = options.file
    path.parent.mkdir(parents=True, exist_ok=True)
    lock_file = path.with_suffix(".lock")
    with open(lock_file, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        if not path.exists():
            _build(options, path)
        lock_file.unlink(missing_ok=True)
    return 0


def _build(options: argparse.Namespace, path: Path) -> None:
    collection = open_store(os.environ["EVENKEEL_STORE_URL"]).collection(options.collection)
    erasures = collection.num_erasures()
    reader = collection.open(options.version)
    if reader.manifest.identity != options.identity:
        return
    if options.scores:
        share = collection.recommender(options.version).build_index(path, threads=options.threads)
        if share < LEAST_SHARE:
            what = f"index of {options.collection} {options.version}: it finds {share:.3f} of users' best items"
            print(f"{what}, below {LEAST_SHARE}: search stays exact", file=sys.stderr)
    else:
        build_index(reader.vectors, reader.statuses, path, threads=options.threads)
    if collection.num_erasures() != erasures:
        for file in (path, path.with_suffix(".usearch")):
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
