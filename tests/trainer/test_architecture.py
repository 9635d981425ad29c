"""docs/development/torchrec.md lists what of FBGEMM and TorchRec a training step runs: profiled, and read from the
imports.

An operator or a name that appears or vanishes is a change of the production path: say so in the document.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "development" / "torchrec.md"
PLANS = {
    "bags": (
        "table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "table_column_wise", "grid",
    ),
    "sequences": ("table_wise", "row_wise", "column_wise", "data_parallel"),
}  # fmt: skip
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")


def table_after(heading: str) -> list[dict[str, str]]:
    """The rows of the first table under a heading, by column."""
    text = DOCUMENT.read_text("utf-8").split(f"## {heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE).group(0).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def documented(heading: str, column: str, marks: str = "x") -> set[str]:
    """The operators with one of these marks in this column."""
    rows = [row for row in table_after(heading) if row[column] in tuple(marks)]
    return {name for row in rows for name in code(row["operator"])}


def profile_steps_by_network(cases):
    from tests.support.by_network import exchanges_by_network

    with exchanges_by_network():
        return profile_steps(cases)


def profile_steps(cases):
    """For each (collection, plan, backend, optimizer): the FBGEMM operators of one training step on this rank."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile
    from torchrec import KeyedJaggedTensor

    from embeddings.optim import SGD, Adagrad, RowwiseAdagrad
    from embeddings.sharding import embedding_bag_collection, embedding_collection
    from embeddings.sse.config import SSEConfig
    from embeddings.tables.config import InitConfig, TableConfig
    from trainer.distributed.sharded_model import PlanRequest, TableSettings, shard_model

    optimizers = {"sgd": SGD(), "adagrad": Adagrad(), "rowwise_adagrad": RowwiseAdagrad()}
    rank, ranks, features = dist.get_rank(), dist.get_world_size(), ("user", "item", "history")
    found = []
    for collection, plan, backend, optimizer in cases:
        pooling = {"bags": {"item": "sum", "history": "mean"}, "sequences": "none"}[collection]
        tables = [
            TableConfig("user", 101, 8, ("user",), "sum" if collection == "bags" else "none", InitConfig("normal")),
            TableConfig("item", 57, 8, ("item", "history"), pooling, InitConfig("normal")),
        ]
        build = embedding_bag_collection if collection == "bags" else embedding_collection
        sharded = shard_model(
            torch.nn.ModuleDict({"embeddings": build(tables)}),
            TableSettings.of(tables, optimizers[optimizer], {"item": SSEConfig(0.2)}, backend=backend),
            PlanRequest({table.name: plan for table in tables}),
        )  # fmt: skip
        for step in (1, 2):
            batch = KeyedJaggedTensor(
                list(features), torch.randint(2, 50, (32,)), lengths=torch.tensor([1] * 16 + [2] * 8), stride=8
            )
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                sharded.set_context(step, rank * 8, 8 * ranks)
                blocks = sharded.module["embeddings"](batch)
                outputs = [blocks.values()] if collection == "bags" else [blocks[name].values() for name in features]
                sum(output.square().sum() for output in outputs).backward()
                sharded.all_reduce_gradients()
                sharded.step_tables(step)
        found.append(sorted({event.name for event in seen.events() if event.name.startswith("fbgemm::")}))
    return found


@pytest.mark.parametrize(("run", "marks"), [(profile_steps, "x"), (profile_steps_by_network, "xn")])
@pytest.mark.parametrize("collection", ["bags", "sequences"])
def test_a_step_runs_the_documented_operators_of_distribution_and_no_others(ranks, collection, run, marks):
    plans = PLANS[collection]
    cases = [(collection, plan, "cpu", "adagrad") for plan in plans]
    for names in zip(plans, *ranks(2).run(run, cases, timeout_seconds=300), strict=True):
        plan, seen = names[0], set().union(*names[1:])
        assert seen == documented(f"Operators of distribution: {collection}", plan, marks), f"{collection}, {plan}"


def test_every_plan_is_profiled():
    from embeddings.sharding import BAG_SHARDINGS, SEQUENCE_SHARDINGS
    from embeddings.tables.shardings import SHARDINGS, shardings_for

    assert set(PLANS["bags"]) == set(shardings_for(sequences=False))
    assert [SHARDINGS[name].torchrec_type for name in shardings_for(sequences=False)] == list(BAG_SHARDINGS)
    assert set(PLANS["sequences"]) == set(shardings_for(sequences=True))
    assert [SHARDINGS[name].torchrec_type for name in shardings_for(sequences=True)] == list(SEQUENCE_SHARDINGS)


def test_the_fbgemm_kernel_runs_the_documented_operators_and_no_others(ranks):
    cases = [("bags", "table_wise", "fbgemm", optimizer) for optimizer in OPTIMIZERS]
    (found,) = ranks(1).run(profile_steps, cases, timeout_seconds=300)
    # On one rank ids are not exchanged; whatever else is there is the kernel's.
    exchange = documented("Operators of distribution: bags", "table_wise")
    for optimizer, seen in zip(OPTIMIZERS, found, strict=True):
        assert set(seen) - exchange == documented("Operators of kernel: fbgemm", optimizer)


def imports_of(path: Path) -> set[str]:
    """Dotted names that a module takes from torchrec, whenever and wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torchrec":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "torchrec"}
    return found


@pytest.mark.slow
def test_every_name_taken_from_torchrec_is_documented_and_no_other():
    used = {
        name
        for package in ("embeddings", "trainer", "service")
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in imports_of(path)
    }
    listed = [name for row in table_after("Names taken from TorchRec") for name in code(row["name"])]
    assert sorted(listed) == sorted(used)
