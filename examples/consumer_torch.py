"""A PyTorch consumer of item vectors: trained once, and scored again whenever a refresh is published.

    python examples/consumer_torch.py train items labels.parquet model.safetensors
    python examples/consumer_torch.py watch items labels.parquet model.safetensors --polls 3 --seconds 60

``labels.parquet`` has the columns ``item`` and ``label``. ``watch`` polls every ``--seconds``; as long as the version
has not changed, the service answers with an empty 304. Address and key come from EVENKEEL_URL and EVENKEEL_API_KEY.
Exit code 3: the collection began a new anchor generation, train again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from service.client import Client

RETRAIN = 3
STEPS = 300


class Consumer(nn.Module):
    """Standardisation by the moments of the training day, then a small network. [n, dim] -> logits [n, num_classes]."""

    def __init__(self, dim: int, num_classes: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))
        self.layers = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, num_classes))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers((vectors - self.mean) / self.scale)
        return logits


def train(client: Client, collection: str, items: list, labels: list, path: Path) -> None:
    torch.manual_seed(0)
    got = client.vectors(collection, items, as_="torch")
    classes = sorted(set(labels))
    wanted = torch.tensor([classes.index(label) for label in labels])[got.found]
    vectors = got.vectors[got.found]
    model = Consumer(got.dim, len(classes))
    model.mean, model.scale = vectors.mean(dim=0), vectors.std(dim=0) + 1e-6
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(vectors), wanted).backward()
        optimizer.step()
    generation = client.version(collection, got.version)["anchor_generation"]
    about = {"classes": json.dumps(classes), "version": got.version, "anchor_generation": str(generation)}
    save_file(model.state_dict(), path, about)
    print(json.dumps({"trained_on": got.version, "items": len(vectors), "anchor_generation": generation}))


def load(path: Path) -> tuple[Consumer, dict[str, str]]:
    with safe_open(path, "pt") as file:
        about = file.metadata()
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = Consumer(len(state["mean"]), len(json.loads(about["classes"])))
    model.load_state_dict(state)
    return model.eval(), about


def watch(client: Client, collection: str, items: list, labels: list, path: Path, polls: int, seconds: float) -> int:
    model, about = load(path)
    classes = json.loads(about["classes"])
    wanted = torch.tensor([classes.index(label) for label in labels])
    got = None
    for number in range(polls):
        if number:
            time.sleep(seconds)
        fresh = client.vectors(collection, items, as_="torch", previous=got)
        if fresh is got:
            continue
        got = fresh
        generation = client.version(collection, got.version)["anchor_generation"]
        if str(generation) != about["anchor_generation"]:
            print(f"version {got.version} began anchor generation {generation}: train again", file=sys.stderr)
            return RETRAIN
        with torch.inference_mode():
            right = model(got.vectors[got.found]).argmax(dim=1) == wanted[got.found]
        told = {
            "version": got.version,
            "trained_on": about["version"],
            "accuracy": round(right.float().mean().item(), 4),
        }
        print(json.dumps(told), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("train", "watch"))
    parser.add_argument("collection")
    parser.add_argument("labels", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--polls", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="between polls")
    options = parser.parse_args()
    table = pq.read_table(options.labels, columns=["item", "label"]).to_pydict()
    arguments = (options.collection, table["item"], table["label"], options.model)
    with Client() as client:
        if options.command == "watch":
            return watch(client, *arguments, options.polls, options.seconds)
        train(client, *arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
