"""``python -m embeddings.store.build_index COLLECTION VERSION FILE``: build a nearest-neighbour index.

The store's URL is read from EVENKEEL_STORE_URL and not given as an argument, since it may hold a password.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from pathlib import Path

from embeddings.store.backend_registry import open_store
from embeddings.store.nearest_neighbors import build_index


def main() -> int:
    """Build one index, unless another process is building it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("collection", "version"):
        parser.add_argument(name)
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    path: Path = options.file
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        if not path.exists():
            collection = open_store(os.environ["EVENKEEL_STORE_URL"]).collection(options.collection)
            erasures = collection.num_erasures()
            reader = collection.open(options.version)
            build_index(reader.vectors, reader.statuses, path, threads=options.threads)
            if collection.num_erasures() != erasures:
                path.unlink(missing_ok=True)
        lock_file = path.with_suffix(".lock")
        lock_file.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
