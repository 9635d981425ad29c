"""Lists whose ids have weights: through preparation, batches and the kernel, beside a plain loop."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build
from trainer.launch.on_host import single_rank_group
from trainer.spec import SpecError, parse_dataset, parse_job

TAGS = [["a", "b"], [], ["c"], ["a", None, "b"], ["b", "b"], ["a", "c"], ["a"], ["c", "a"]]
WEIGHTS = [[0.5, 2.0], [], [3.0], [1.0, 9.0, 4.0], [0.0, 0.0], [1.0, 0.0], [2.0], [0.25, 0.75]]


def write(path, tags=TAGS, weights=WEIGHTS):
    columns = {"user": [1, 2, 1, 2, 1, 2, 1, 2], "tags": tags, "w": weights, "click": [0, 1, 0, 1, 0, 1, 0, 1]}
    pq.write_table(pa.table(columns), path)
    return path


def specs(path, pooling, **changes):
    tags = {"type": "id_list", "weights": "w", "pooling": pooling}
    dataset = {
        "name": "tags",
        "uri": str(path),
        "features": {"user": {"type": "id"}, "tags": tags},
        "label": {"column": "click"},
    } | changes
    job = {
        "name": "tags",
        "dataset": {"name": "tags"},
        "model": {"kind": "dnn", "embedding_dim": 4, "hidden": [8], "init": {"kind": "hash", "std": 1.0}},
        "optimizer": {"kind": "sgd", "learning_rate": 0.5},
        "batch_size": 8,
        "evaluation": {"split": {"validation": 0.0, "test": 0.0}},
    }
    return parse_dataset(dataset), parse_job(job)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_rows_are_multiplied_with_their_weights(tmp_path, pooling):
    dataset, job = specs(write(tmp_path / "rows.parquet"), pooling)
    data = prepare(dataset, job, tmp_path / "data")
    (batch,) = data.eval_batches("train", 8)
    ids = data.vocabulary("tags").to_pylist()
    with single_rank_group():
        sharded = build(job, data, alpha=None)
        table = next(sharded._sharded.kernels())
        before = table.read("tags").clone()
        sharded.set_context(1, 0, 8)
        pooled = sharded.module.embeddings(batch.features).to_dict()["tags"]
        pooled.sum().backward()
        sharded.step_tables(1)
        after = table.read("tags")
    expected, moved = torch.zeros(8, 4), torch.zeros_like(before)
    for number, (tags, weights) in enumerate(zip(TAGS, WEIGHTS, strict=True)):
        pairs = [(ids.index(tag) + 2, weight) for tag, weight in zip(tags, weights, strict=True) if tag is not None]
        total = sum(weight for _, weight in pairs) if pooling == "mean" else 1.0
        for row, weight in pairs:
            if total:
                expected[number] += before[row] * weight / total
                moved[row] += weight / total
    torch.testing.assert_close(pooled.detach(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(after, before - 0.5 * moved, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([[0.5]], r"the weights \[0.5\] do not match the ids \['a', 'b'\]"),
        ([[0.5, -1.0]], r"at least 0"),
        ([[0.5, None]], r"one weight for each id"),
        ([[0.5, float("nan")]], r"row 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, weights, said):
    path = write(tmp_path / "rows.parquet", weights=[*weights, *WEIGHTS[1:]])
    with pytest.raises(DataError, match=said):
        prepare(*specs(path, "sum"), tmp_path / "data")


def test_they_may_be_text(tmp_path):
    """As CSV files have them."""
    told = write(tmp_path / "rows.parquet", tags=["a|b", None, "c", "a|b", "b|b", "a|c", "a", "c|a"],
                 weights=["0.5|2", None, "3", "1|4", "0|0", "1|0", "2", "0.25|0.75"])  # fmt: skip
    found = prepare(*specs(told, "mean"), tmp_path / "text")
    data = prepare(*specs(write(tmp_path / "lists.parquet"), "mean"), tmp_path / "lists")
    key = data.keys[1]
    np.testing.assert_array_equal(found.weights("train", key), data.weights("train", key))


def test_din_weighs_lists_itself(tmp_path):
    dataset, job = specs(write(tmp_path / "rows.parquet"), "mean")
    job = parse_job(job.model_dump(mode="json") | {"model": {"kind": "din", "embedding_dim": 4}})
    with pytest.raises(ValueError, match=r"features\.tags\.weights: din weighs lists itself"):
        job.against(dataset)
    join = {"uri": "x.parquet", "on": "user", "column": "t", "take": "all"}
    with pytest.raises(SpecError, match="weights are for an id_list"):
        specs(tmp_path / "rows.parquet", "mean", features={"t": {"type": "id_list", "join": join, "weights": "w"}})


def test_a_day_on_which_nobody_has_a_list_is_a_day_of_empty_lists(tmp_path):
    """pandas and pyarrow write such a column without a type."""
    days = tmp_path / "days"
    days.mkdir()
    write(days / "a.parquet")
    write(days / "b.parquet", [None] * 8, [None] * 8)
    assert pq.read_schema(days / "b.parquet").field("w").type == pa.null()
    found = prepare(*specs(days, "sum"), tmp_path / "both")
    data = prepare(*specs(write(tmp_path / "lists.parquet"), "sum"), tmp_path / "one")
    assert found.num_examples["train"] == 2 * data.num_examples["train"]
    np.testing.assert_array_equal(found.weights("train", found.keys[1]), data.weights("train", data.keys[1]))
