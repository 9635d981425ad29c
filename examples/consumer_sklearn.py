"""A scikit-learn consumer of item vectors: trained once, scored on every later refresh.

    python examples/consumer_sklearn.py train items labels.parquet model.npz
    python examples/consumer_sklearn.py score items labels.parquet model.npz

``labels.parquet`` has the columns ``item`` and ``label``. Address and key come from EVENKEEL_URL and EVENKEEL_API_KEY.
It keeps working across refreshes because it standardises with the moments of the training day, leaves missing items
out, and checks the anchor generation: only when that changes must the model be trained again (exit code 3).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from service.client import Client

RETRAIN = 3


def fetch(client: Client, collection: str, labels: Path, version: str) -> tuple[Any, np.ndarray, int]:
    """Return the vectors of the labelled items, their labels, and the anchor generation of the version."""
    table = pq.read_table(labels, columns=["item", "label"])
    got = client.vectors(collection, table["item"], version=version)
    generation = client.version(collection, got.version)["anchor_generation"]
    return got, np.array(table["label"].to_pylist()), generation


def train(client: Client, collection: str, labels: Path, model: Path, version: str) -> None:
    got, wanted, generation = fetch(client, collection, labels, version)
    scaler = StandardScaler().fit(got.vectors[got.found])
    classifier = LogisticRegression(max_iter=1000)
    classifier.fit(scaler.transform(got.vectors[got.found]), wanted[got.found])
    # With two classes scikit-learn has a single row of weights: make one for each class.
    signs = np.array([[-1.0], [1.0]]) if len(classifier.classes_) == 2 else 1.0
    np.savez(
        model,
        mean=scaler.mean_,
        scale=scaler.scale_,
        weights=classifier.coef_ * signs,
        bias=classifier.intercept_ * np.ravel(signs),
        classes=classifier.classes_,
        anchor_generation=generation,
        version=got.version,
    )
    print(json.dumps({"trained_on": got.version, "items": int(got.found.sum()), "anchor_generation": generation}))


def score(client: Client, collection: str, labels: Path, model: Path, version: str) -> int:
    got, wanted, generation = fetch(client, collection, labels, version)
    with np.load(model, allow_pickle=False) as trained:
        if generation != trained["anchor_generation"]:
            print(f"version {got.version} is of anchor generation {generation}, the model of "
                  f"{trained['anchor_generation']}: train it again, or pin --version {trained['version']} until then",
                  file=sys.stderr)  # fmt: skip
            return RETRAIN
        standardised = (got.vectors[got.found] - trained["mean"]) / trained["scale"]
        logits = standardised @ trained["weights"].T + trained["bias"]
        predicted = trained["classes"][logits.argmax(axis=1)]
        told = {
            "version": got.version,
            "trained_on": str(trained["version"]),
            "accuracy": round(float(np.mean(predicted == wanted[got.found])), 4),
            "missing": int(np.sum(~got.found)),
        }
    print(json.dumps(told))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("train", "score"))
    parser.add_argument("collection")
    parser.add_argument("labels", type=Path)
    parser.add_argument("model", type=Path, help="a file that ends in .npz")
    parser.add_argument("--version", default="current", help="a version such as v000001 pins it")
    options = parser.parse_args()
    arguments = (options.collection, options.labels, options.model, options.version)
    with Client() as client:
        if options.command == "score":
            return score(client, *arguments)
        train(client, *arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
