"""Feast as a peer: materializes a feature repository once, reads random ids from it, and prints figures as JSON.

The program is run by the interpreter of Feast's own environment (docs/guides/store.md). It imports nothing from this
project, since that environment lacks its dependencies.

    python feast_peer.py FOLDER VIEW ENTITY IDS.npy [IDS.npy ...]

The program prints ``materialize_seconds``; ``get_ms`` for each file of ids, conversion to float32 [n, dim] included;
and ``sums`` of the answers, for the caller to compare.
"""

import json
import sys
import time
from datetime import UTC, datetime, timedelta

import numpy as np
from feast import FeatureStore  # type: ignore[import-not-found]  # installed in Feast's environment only

folder, view, entity, *files = sys.argv[1:]
store = FeatureStore(repo_path=folder)
now = datetime.now(UTC)
start = time.perf_counter()
store.materialize(now - timedelta(days=365), now + timedelta(minutes=1))
seconds, times, sums = time.perf_counter() - start, [], []
for file in files:
    rows = [{entity: one} for one in np.load(file).tolist()]
    start = time.perf_counter()
    answer = store.get_online_features(features=[f"{view}:vector"], entity_rows=rows).to_dict()["vector"]
    width = max((len(one) for one in answer if one is not None), default=0)
    vectors = np.array([[0.0] * width if one is None else one for one in answer], dtype=np.float32)
    times.append(1e3 * (time.perf_counter() - start))
    sums.append(float(vectors.sum(dtype=np.float64)))
print(json.dumps({"materialize_seconds": seconds, "get_ms": times, "sums": sums}))
