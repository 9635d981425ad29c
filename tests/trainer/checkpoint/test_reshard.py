"""What any number of ranks saved in any plan, any other loads: rows and their state bit for bit, each written once."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from embeddings.optim import AdamAR, RowwiseAdam
from embeddings.tables.config import TableConfig
from trainer.checkpoint.format import Checkpoint, TableShard, latest_valid, save

pytestmark = pytest.mark.xdist_group("ranks")

# Rows and columns that no number of ranks divides; a column piece is a multiple of 4 wide in TorchRec.
TABLES = (TableConfig("user", 37, 24, ("user",)), TableConfig("item", 23, 20, ("item", "other")))
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
# Where no row is split, which a state that is one number for a row needs.
WHOLE_ROWS = ("table_wise", "row_wise", "data_parallel")
ADAM, ROWWISE = AdamAR(alpha=1e-3), RowwiseAdam()
WORLD_SIZES = (1, 2, 4)
STEP = 9


def canonical(table: TableConfig, optimizer=ADAM) -> TableShard:
    """The whole table with a state of its own in every element."""
    generator = torch.Generator().manual_seed(table.num_rows)
    size = (table.num_rows, table.dim)
    size_of_v = size[: 1 if "v" in optimizer.row_state_names else 2]
    state = {
        "m": torch.randn(size, generator=generator),
        "v": torch.rand(size_of_v, generator=generator),
        "last_update_step": torch.randint(0, STEP + 1, (table.num_rows,), generator=generator, dtype=torch.int32),
    }
    return TableShard(table.name, table.num_rows, 0, torch.randn(size, generator=generator), state)


class Model(torch.nn.Module):
    """Tables and one dense layer."""

    def __init__(self, tables=TABLES):
        from trainer.distributed.sharded_model import embedding_bag_collection

        super().__init__()
        self.embeddings = embedding_bag_collection(tables)
        self.layer = torch.nn.Linear(3, 1)


def make(kind, optimizer=ADAM, tables=TABLES):
    from trainer.distributed.sharded_model import PlanRequest, TableSettings, shard_model

    plan = {table.name: kind for table in tables}
    return shard_model(
        Model(tables), TableSettings.of(tables, optimizer, seed=5, backend="reference"), PlanRequest(plan)
    )


def save_in_every_plan(source, folder, kinds=KINDS, optimizer=ADAM):
    """Takes over the checkpoint at ``source`` in each plan, and saves it again from there."""
    import torch.distributed as dist

    for kind in kinds:
        sharded = make(kind, optimizer)
        sharded.load_from(Checkpoint(source))
        sharded.save(f"{folder}/{kind}-{dist.get_world_size()}")


def load_in_every_plan(folder, kinds=KINDS, optimizer=ADAM):
    """What each plan of these ranks makes of every checkpoint: what is not as it should be, and what was held."""
    wrong, held = [], {}
    expected = {table.name: canonical(table, optimizer) for table in TABLES}
    for kind in kinds:
        sharded = make(kind, optimizer)
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


def save_source(folder, optimizer=ADAM):
    """The canonical tables as a checkpoint in ``folder``/source; its path."""
    dense = {f"model/layer.{name}": value for name, value in torch.nn.Linear(3, 1).state_dict().items()}
    tables = [canonical(table, optimizer) for table in TABLES]
    return save(folder / "source", step=STEP, tables=tables, dense=dense, extra={"completed_steps": STEP})


def stored_numbers(path):
    """By tensor, how many numbers the tables of the checkpoint in ``path`` hold in all files together."""
    stored = {}
    for file in latest_valid(path).path.glob("table-*"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                stored[name] = stored.get(name, 0) + tensors.get_tensor(name).numel()
    return stored


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A folder with a checkpoint from every plan on every number of ranks."""
    folder = tmp_path_factory.mktemp("plans")
    source = save_source(folder)
    for world_size in WORLD_SIZES:
        ranks(world_size).run(save_in_every_plan, str(source), str(folder))
    return folder


def test_every_element_is_written_once(saved):
    paths = [saved / f"{kind}-{size}" for kind, size in itertools.product(KINDS, WORLD_SIZES)]
    for path in paths:
        found, stored = latest_valid(path), stored_numbers(path)
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


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_number_for_a_row_is_written_once_and_loads_in_every_plan(ranks, tmp_path, world_size):
    source = save_source(tmp_path, ROWWISE)
    ranks(world_size).run(save_in_every_plan, str(source), str(tmp_path), WHOLE_ROWS, ROWWISE)
    elements, rows = sum(t.num_rows * t.dim for t in TABLES), sum(t.num_rows for t in TABLES)
    for kind in WHOLE_ROWS:
        assert stored_numbers(tmp_path / f"{kind}-{world_size}") == {
            "weight": elements, "state.m": elements, "state.v": rows, "state.last_update_step": rows,
        }  # fmt: skip
    for other_size in (1, 2):
        results = ranks(other_size).run(load_in_every_plan, str(tmp_path), WHOLE_ROWS, ROWWISE)
        assert [wrong for wrong, _ in results] == [[]] * other_size


def continue_grown(source, kind):
    """A warm start from ``source`` whose tables have lost every third row and gained five: (table, first row, m, v)."""
    grown = tuple(dataclasses.replace(t, num_rows=len(kept_rows(t)) + 5, row_count=-1) for t in TABLES)
    sharded = make(kind, ROWWISE, grown)
    parents = {t.name: torch.cat([kept_rows(t), torch.full((5,), -1)]) for t in TABLES}
    sharded.load_from(Checkpoint(source), parent_rows=parents)
    pieces = sharded._sharded.local_pieces()
    states = [(piece, piece.tables.state(piece.name)) for piece in pieces]
    return [(piece.name, piece.row_start, state["m"].clone(), state["v"].clone()) for piece, state in states]


def kept_rows(table):
    rows = torch.arange(table.num_rows)
    return rows[(rows < 2) | (rows % 3 != 0)]


@pytest.mark.parametrize("kind", WHOLE_ROWS)
def test_rows_of_new_ids_have_no_state_and_old_ones_keep_theirs(ranks, tmp_path, kind):
    source = save_source(tmp_path, ROWWISE)
    for found in ranks(2).run(continue_grown, str(source), kind):
        for name, start, m, v in found:
            (table,) = (t for t in TABLES if t.name == name)
            old, kept = canonical(table, ROWWISE).state, kept_rows(table)
            for value, was in ((m, old["m"]), (v, old["v"])):
                wanted = torch.cat([was[kept], torch.zeros(5, *was.shape[1:])])
                assert torch.equal(value, wanted[start : start + len(value)])
