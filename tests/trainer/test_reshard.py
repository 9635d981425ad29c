"""What any number of ranks saved in any plan, any other loads: rows and their state bit for bit, each written once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from embeddings.config import TableConfig
from embeddings.optim import AdamAR
from trainer.checkpoint import Checkpoint, TableShard, latest_valid, save

# Rows and columns that no number of ranks divides; a column piece is a multiple of 4 wide in TorchRec.
TABLES = (TableConfig("user", 37, 24, ("user",)), TableConfig("item", 23, 20, ("item", "other")))
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
WORLD_SIZES = (1, 2, 4)
STEP = 9


def canonical(table: TableConfig) -> TableShard:
    """The whole table with a state of its own in every element."""
    generator = torch.Generator().manual_seed(table.num_rows)
    size = (table.num_rows, table.dim)
    state = {
        "m": torch.randn(size, generator=generator),
        "v": torch.rand(size, generator=generator),
        "last_update_step": torch.randint(0, STEP + 1, (table.num_rows,), generator=generator, dtype=torch.int32),
    }
    return TableShard(table.name, table.num_rows, 0, torch.randn(size, generator=generator), state)


class Model(torch.nn.Module):
    """Tables and one dense layer."""

    def __init__(self):
        from trainer.sharding import embedding_bag_collection

        super().__init__()
        self.embeddings = embedding_bag_collection(TABLES)
        self.layer = torch.nn.Linear(3, 1)


def make(kind):
    from trainer.sharding import shard_model

    plan = {table.name: kind for table in TABLES}
    return shard_model(Model(), TABLES, AdamAR(alpha=1e-3), {}, plan, seed=5, backend="reference")


def save_in_every_plan(source, folder):
    """Takes over the checkpoint at ``source`` in each plan, and saves it again from there."""
    import torch.distributed as dist

    for kind in KINDS:
        sharded = make(kind)
        sharded.load_from(Checkpoint(source))
        sharded.save(f"{folder}/{kind}-{dist.get_world_size()}")


def load_in_every_plan(folder):
    """What each plan of these ranks makes of every checkpoint: what is not as it should be, and what was held."""
    wrong, held = [], {}
    expected = {table.name: canonical(table) for table in TABLES}
    for kind in KINDS:
        sharded = make(kind)
        for path in sorted(Path(folder).iterdir()):
            for piece in sharded._sharded.local_pieces():
                piece.tables.reset()
            sharded.load_from(latest_valid(path))
            held[kind] = 0
            for piece in sharded._sharded.local_pieces():
                rows = slice(piece.row_start, piece.row_start + piece.row_count)
                columns = slice(piece.column_start, piece.column_start + piece.column_count)
                whole = expected[piece.name]
                for name, value in (("weight", whole.weight), *whole.state.items()):
                    part = value[rows] if value.dim() == 1 else value[rows, columns]
                    mine = {"weight": piece.tables.weight(piece.name), **piece.tables.state(piece.name)}[name]
                    if not torch.equal(mine, part):
                        wrong.append((path.name, kind, piece.name, name))
                    held[kind] += part.numel() if name == "weight" else 0
                wrong.extend([(path.name, kind, "step")] if piece.tables.completed_steps != STEP else [])
    return wrong, held


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A folder with a checkpoint from every plan on every number of ranks."""
    folder = tmp_path_factory.mktemp("plans")
    extra = {"completed_steps": STEP}
    dense = {f"model/layer.{name}": value for name, value in torch.nn.Linear(3, 1).state_dict().items()}
    source = save(folder / "source", step=STEP, tables=[canonical(t) for t in TABLES], dense=dense, extra=extra)
    for world_size in WORLD_SIZES:
        ranks(world_size).run(save_in_every_plan, str(source), str(folder))
    return folder


def test_every_element_is_written_once(saved):
    paths = [saved / f"{kind}-{size}" for kind, size in itertools.product(KINDS, WORLD_SIZES)]
    for path in paths:
        found = latest_valid(path)
        stored = {}
        for file in found.path.glob("table-*"):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    stored[name] = stored.get(name, 0) + tensors.get_tensor(name).numel()
        elements = sum(table.num_rows * table.dim for table in TABLES)
        rows = sum(table.num_rows for table in TABLES)
        assert stored == {"weight": elements, "state.m": elements, "state.v": elements, "state.last_update_step": rows}
        for table in TABLES:
            weight, state = found.read_rows(table.name)
            assert torch.equal(weight, canonical(table).weight)
            assert all(torch.equal(state[name], value) for name, value in canonical(table).state.items())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_plan_loads_what_every_plan_saved(ranks, saved, world_size):
    results = ranks(world_size).run(load_in_every_plan, str(saved))
    assert [wrong for wrong, _ in results] == [[]] * world_size
    elements = sum(table.num_rows * table.dim for table in TABLES)
    for kind in KINDS:
        held = [of_rank[kind] for _, of_rank in results]
        assert sum(held) == elements * (world_size if kind == "data_parallel" else 1)
        if kind == "row_wise":
            assert all(held)
