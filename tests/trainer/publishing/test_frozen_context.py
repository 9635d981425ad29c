"""publish.frozen_context: what items are trained against is the parent's, to the bit; what is new of it is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor

from tests.trainer.launch.detached_runs import everything
from trainer.checkpoint.format import latest_valid
from trainer.checkpoint.warm_start import id_maps, rows_of_parent
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build
from trainer.distributed.materialize import read_rows
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.launch.worker import use_threads
from trainer.publishing import frozen_context
from trainer.publishing.frozen_context import FrozenContext
from trainer.runs.directory import Run, read_run, write_run
from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer

pytestmark = pytest.mark.slow

DIM = 4
HASH = {"kind": "hash", "std": 0.3}
ADAMW = {"kind": "adamw", "learning_rate": 0.03, "weight_decay": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "bpr": {"model": {"kind": "bpr", "loss": "bpr", "embedding_dim": DIM, "init": HASH}, "optimizer": ADAMW},
    "mf": {"model": {"kind": "mf", "embedding_dim": DIM, "init": HASH}, "optimizer": ADAMW},
    "two_tower": {
        "model": {"kind": "two_tower", "embedding_dim": DIM, "hidden": [8], "init": HASH},
        "optimizer": {"kind": "adam_ar", "learning_rate": 0.03, "alpha": 0.003},
    },
    "dcnv2": {
        "model": {"kind": "dcnv2", "embedding_dim": DIM, "hidden": [8], "init": HASH},
        "optimizer": {"kind": "adam_ar", "learning_rate": 0.03, "alpha": 0.003},
    },
    "deepfm": {
        "model": {"kind": "deepfm", "embedding_dim": DIM, "hidden": [8], "init": HASH},
        "optimizer": ADAMW,
    },
    "item2vec": {
        "model": {"kind": "item2vec", "embedding_dim": DIM, "window": 2, "negatives": 2, "init": HASH},
        "optimizer": {"kind": "adam", "learning_rate": 0.03},
    },
}
PUBLISH = {"collection": "items", "feature": "item", "ema": None, "gate": {"mode": "off"}}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    use_threads(1)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Two days of rows in order: users 0 to 39 and items 0 to 79, then users and items from 10 on, and new ones."""
    rng, folder, paths = np.random.default_rng(0), tmp_path_factory.mktemp("logs"), []
    for day, first in enumerate((0, 10)):
        user, item = first + rng.integers(0, 40, 1500), first + (rng.random(1500) ** 2 * 80).astype(np.int64)
        click = (rng.random(1500) < np.where((user + item) % 3 == 0, 0.9, 0.3)).astype(np.int64)
        paths.append(folder / f"day-{day}.parquet")
        table = pa.table({"user": user, "item": item, "click": click, "pos": np.arange(1500)})
        pq.write_table(table, paths[-1])
    return paths


def run_of(folder, name: str, kind: str, rows, parent: Run | None = None, items: str = "fresh", **changes: Any) -> Run:
    sequence = kind == "item2vec"
    dataset = {
        "name": "clicks", "uri": str(rows), "features": {"user": {"type": "id"}, "item": {"type": "id"}},
        "label": {"rule": "click >= 0"} if sequence else {"column": "click"}, "order": "pos",
    }  # fmt: skip
    job = {
        "name": "small", "dataset": {"name": "clicks"}, "epochs": 1, "batch_size": 200, "publish": PUBLISH,
        "evaluation": {"split": {"kind": "per_user_last"}} if sequence else {}, **MODELS[kind],
    }  # fmt: skip
    if parent is not None:
        job |= {
            "init_from": {"job": parent.run_id},
            "publish": PUBLISH | {"frozen_context": {"items": items}},
            "seed": 9,
        }
    attempt = changes.pop("attempt", 1)
    directory = write_run(
        folder / name, run_id=name, job=parse_job(job | changes), dataset=parse_dataset(dataset), attempt=attempt,
        store_url=str(folder / "store"), init_checkpoint=None if parent is None else str(parent.checkpoints),
    )  # fmt: skip
    return read_run(directory)


def as_read(run: Run) -> dict[str, dict[Any, torch.Tensor]]:
    """By table and id, the row that a lookup after the run's last step reads."""
    checkpoint = latest_valid(run.checkpoints)
    found = {}
    for table, ids in id_maps(checkpoint).items():
        rows = torch.cat([part for _, part in read_rows(run.job, checkpoint, table)])
        found[table] = dict(zip(ids.ids.to_pylist(), rows[2:], strict=True))
    return found


def contexts(rows: dict[str, dict[Any, torch.Tensor]], kind: str) -> dict[Any, torch.Tensor]:
    if kind == "item2vec":
        return {id_: row[DIM:] for id_, row in rows["item"].items()}
    return rows["user"]


@pytest.mark.parametrize(
    ("kind", "items"),
    [("bpr", "fresh"), ("bpr", "warm"), ("mf", "fresh"), ("two_tower", "fresh"), ("dcnv2", "fresh"), ("deepfm", "warm"),
     ("item2vec", "fresh"), ("item2vec", "warm")],
)  # fmt: skip
def test_the_parents_context_stays_and_all_else_is_trained(tmp_path, logs, trained_runs, kind, items):
    first = trained_runs.finish(run_of(tmp_path, "first", kind, logs[0]))
    second = run_of(tmp_path, "second", kind, logs[1], first, items)
    unbegun = run_of(tmp_path, "unbegun", kind, logs[1], first, items)
    assert execute(second, start_ranks) == 0
    before, after = as_read(first), as_read(second)
    old, new = contexts(before, kind), contexts(after, kind)
    assert len(old.keys() & new.keys()) >= 30
    for id_ in old.keys() & new.keys():
        assert torch.equal(old[id_], new[id_]), id_
    initial = contexts(initial_rows(unbegun), kind)
    assert len(new.keys() - old.keys()) >= 5
    for id_ in new.keys() - old.keys():
        assert not torch.equal(new[id_], initial[id_]), id_
    for id_ in before["item"].keys() & after["item"].keys():
        # Rows of items moved, also those that began where the parent's are; an item of day one alone is left there.
        moved = not torch.equal(after["item"][id_][:DIM], before["item"][id_][:DIM])
        assert moved or (items == "warm" and id_ < 10), id_
    first_step = latest_valid(second.checkpoints).extra["position"]["first_step"]
    assert (first_step == 0) == (items == "fresh")
    ours, theirs = (latest_valid(run.checkpoints).read_dense() for run in (second, first))
    for name, value in theirs.items():
        assert not name.startswith("model/") or torch.equal(ours[name], value), name


def initial_rows(run: Run) -> dict[str, dict[Any, torch.Tensor]]:
    """By table and id, as the run's job would begin without a parent."""
    prepare(run.dataset, run.job, run.data)
    data = PreparedData.open(run.data)
    with single_rank_group():
        sharded = build(run.job, data, alpha=0.003 if run.job.optimizer.kind == "adam_ar" else None)
        rows = {piece.name: piece.tables.read(piece.name)[2:] for piece in sharded.local_pieces()}
        return {name: dict(zip(data.vocabulary(name).to_pylist(), part, strict=True)) for name, part in rows.items()}


@pytest.mark.parametrize("kind", ["bpr", "item2vec"])
def test_a_run_that_goes_on_ends_with_the_same_bits(tmp_path, logs, trained_runs, kind):
    first = trained_runs.finish(run_of(tmp_path, "first", kind, logs[0]))
    last = {"regularizers": {"early_stopping": {"keep": "last", "patience": 9}}}
    whole = run_of(tmp_path, "whole", kind, logs[1], first, epochs=2, **last)
    parts = run_of(tmp_path, "parts", kind, logs[1], first, epochs=1, **last)
    for run in (whole, parts):
        assert execute(run, start_ranks) == 0
    parts = run_of(tmp_path, "parts", kind, logs[1], first, epochs=2, attempt=2, **last)
    assert execute(parts, start_ranks) == 0
    ours, theirs = (everything(latest_valid(run.checkpoints)) for run in (parts, whole))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def trained(directory: str, number: int) -> list[tuple[str, int, int, torch.Tensor]]:
    """After so many steps, in float64 by plain torch: what this rank holds."""
    use_threads(1)
    run = read_run(directory)
    data = PreparedData.open(run.data)
    parent = latest_valid(run.init_checkpoint)
    sharded = build(run.job, data, alpha=parent.extra["alpha"], backend="reference", dtype=torch.float64)
    frozen_context.begin(sharded, parent, parent, run.job, data)
    frozen_context.freeze_dense(sharded)
    trainer = Trainer(run.job, data, sharded, dense_optimizer(run.job, sharded))
    sharded.train()
    batches = trainer.batches()
    for _ in range(number):
        trainer.train_step(next(batches))
    batches.close()
    return [(p.name, p.row_start, p.column_start, p.tables.read(p.name)) for p in sharded.local_pieces()]


def joined(of_ranks: list[Any]) -> dict[str, torch.Tensor]:
    pieces = sorted((piece for of_rank in of_ranks for piece in of_rank), key=lambda piece: piece[:3])
    found: dict[str, dict[int, list[torch.Tensor]]] = {}
    for name, row, _, rows in pieces:
        found.setdefault(name, {}).setdefault(row, []).append(rows)
    return {name: torch.cat([torch.cat(parts, dim=1) for parts in rows.values()]) for name, rows in found.items()}


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("bpr", {"item": "row_wise", "user": "row_wise"}),
        ("two_tower", {"item": "table_wise", "user": "column_wise"}),
        ("item2vec", {"item": "row_wise"}),
    ],
)
def test_two_ranks_train_what_one_does(tmp_path, logs, trained_runs, ranks, kind, sharding):
    first = trained_runs.finish(run_of(tmp_path, "first", kind, logs[0]))
    second = run_of(tmp_path, "second", kind, logs[1], first)
    prepare(second.dataset, second.job, second.data, base_vocabulary=id_maps(latest_valid(first.checkpoints)))
    with single_rank_group():
        one = joined([trained(str(second.directory), 3)])
    split = {"resources": {"num_workers": 2}, "sharding": sharding, "micro_batches": 2}
    run_of(tmp_path, "second", kind, logs[1], first, **split)
    two = joined(ranks(2).run(trained, str(second.directory), 3))
    for name, rows in one.items():
        # float64 sums in another order, over some steps.
        torch.testing.assert_close(two[name], rows, rtol=1e-9, atol=1e-10)


# --- the lookup ------------------------------------------------------------------------------------------------------

NUM_ROWS = 5


class Bags(nn.Module):
    """Sums of rows in float64 whose gradient can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"embedding_dim": DIM, "num_embeddings": NUM_ROWS}
        self.bags = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name=name, feature_names=[name], **shape) for name in "ab"]
        )

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.bags(features)


@given(
    st.lists(st.tuples(*2 * [st.lists(st.integers(0, NUM_ROWS - 1), max_size=3)]), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=NUM_ROWS, max_size=NUM_ROWS),
)
def test_bags_are_what_they_were_and_frozen_rows_get_no_gradient(samples, frozen):
    bags = Bags()
    lists = [sample[number] for number in range(2) for sample in samples]
    features = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([number for ids in lists for number in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for ids in lists]),
    )
    held = FrozenContext(bags, {"b": torch.tensor(frozen)}, DIM, own_half=False)
    plain, found = bags(features), held(features)
    assert found.keys() == plain.keys()
    torch.testing.assert_close(found.values(), plain.values())
    found.values().square().sum().backward()
    ours = {name: bag.weight.grad for name, bag in bags.bags.embedding_bags.items()}
    bags.zero_grad()
    plain.values().square().sum().backward()
    theirs = {name: bag.weight.grad for name, bag in bags.bags.embedding_bags.items()}
    torch.testing.assert_close(ours["a"], theirs["a"])
    kept = ~torch.tensor(frozen)
    torch.testing.assert_close(ours["b"][kept], theirs["b"][kept])
    assert not ours["b"][~kept].any()


def test_of_rows_with_two_halves_the_frozen_one_gets_no_gradient():
    weight = torch.randn(NUM_ROWS, 2 * DIM, requires_grad=True)
    frozen = torch.tensor([False, True, False, True, True])
    ids = torch.tensor([1, 2, 2, 4])

    class Sequences(nn.Module):
        def forward(self, features):
            return {"item": JaggedTensor(weight[features["item"].values()], lengths=features["item"].lengths())}

    held = FrozenContext(Sequences(), {"item": frozen}, DIM, own_half=True)
    found = held(KeyedJaggedTensor(["item"], ids, lengths=torch.tensor([1, 3])))["item"]
    assert torch.equal(found.values(), weight[ids])
    found.values().sum().backward()
    counts = torch.bincount(ids, minlength=NUM_ROWS).float()[:, None]
    assert torch.equal(weight.grad[:, :DIM], counts.expand(-1, DIM))
    assert torch.equal(weight.grad[:, DIM:], (counts * ~frozen[:, None]).expand(-1, DIM))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("bpr", {"init_from": None}, "the context comes from a parent: name the parent in init_from"),
        ("bpr", {"sse": {"user": {"probability": 0.1}}}, "sse of user would change frozen rows"),
        ("bpr", {"optimizer": ADAMW | {"first_touch": "literal"}}, "first_touch literal"),
        ("item2vec", {"optimizer": ADAMW}, "adamw decays it as a whole"),
        ("two_tower", {"model": MODELS["two_tower"]["model"] | {"batch_norm": True}}, "model.batch_norm"),
        ("sasrec", {"model": {"kind": "sasrec", "loss": "bce", "embedding_dim": DIM}}, "on both sides"),
        ("din", {"model": {"kind": "din", "embedding_dim": DIM, "init": HASH}}, "on both sides"),
    ],
)
def test_what_it_has_no_meaning_for_is_refused(kind, changes, words):
    job = {
        "name": "small", "dataset": {"name": "clicks"}, "init_from": {"job": "first"},
        "publish": PUBLISH | {"frozen_context": {}}, **MODELS.get(kind, {}),
    }  # fmt: skip
    with pytest.raises(SpecError, match=f"publish.frozen_context: .*{words}"):
        parse_job(job | changes)


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        ({"type": "id_list", "shares": "item"}, "reads rows of 'item', which are trained"),
        ({"type": "id_list", "pooling": "mean"}, "mixes frozen and trained rows"),
    ],
)
def test_context_that_cannot_be_held_is_refused(feature, words):
    job = parse_job(
        {
            "name": "small", "dataset": {"name": "clicks"}, "init_from": {"job": "first"},
            "publish": PUBLISH | {"frozen_context": {}}, **MODELS["two_tower"],
        }
    )  # fmt: skip
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "tags": feature}
    dataset = parse_dataset({"name": "clicks", "uri": "rows.parquet", "features": features, "label": {"column": "y"}})
    with pytest.raises(ValueError, match=f"publish.frozen_context: .*'tags' {words}"):
        job.against(dataset)


def test_the_first_job_of_a_schedule_has_no_context_to_hold(tmp_path, logs):
    first = run_of(tmp_path, "first", "bpr", logs[0])
    job = first.job.model_dump(mode="json") | {"init_from": {"collection": "items"}}
    job["publish"] |= {"frozen_context": {"items": "fresh"}}
    alone = parse_job(job)
    data = prepare(first.dataset, alone, first.data)
    assert not frozen_context.is_frozen(alone, data)
    assert rows_of_parent(alone, data)["user"].max() == 1
