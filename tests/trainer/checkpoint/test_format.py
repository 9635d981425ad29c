"""Checkpoints: written whole or not at all, every changed byte found, read in any plan."""

import itertools
import json
import os
import resource
import shutil
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.support import small_disk
from trainer.checkpoint import format as checkpoint_format
from trainer.checkpoint.format import Checkpoint, CheckpointError, TableShard, latest_valid, save
from trainer.runs.failures import classify

DENSE = {"model/layer.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(7)}


def make_table(name, num_rows, dim, seed, dtype=torch.float32):
    """A whole table with the three kinds of row state: like the weight, one integer per row, and a strided view."""
    generator = torch.Generator().manual_seed(seed)
    interleaved = torch.randn(num_rows, 2, dim, generator=generator, dtype=dtype)
    state = {
        "m": interleaved[:, 0],
        "v": interleaved[:, 1],
        "last_update_step": torch.randint(0, 2**31 - 1, (num_rows,), generator=generator, dtype=torch.int32),
    }
    return TableShard(name, num_rows, 0, torch.randn(num_rows, dim, generator=generator, dtype=dtype), state)


def cut(table, start, stop, left=0, right=None):
    """The rows [start, stop) and columns [left, right) of a whole table, as a rank that holds them has them."""

    def part(value):
        return value[start:stop] if value.dim() == 1 else value[start:stop, left:right]

    state = {name: part(value) for name, value in table.state.items()}
    return TableShard(table.name, table.num_rows, start, part(table.weight), state, left, table.weight.shape[1])


def assert_rows_equal(found, table, start=0, stop=None, left=0, right=None):
    weight, state = found
    expected = cut(table, start, stop, left, right)
    assert torch.equal(weight, expected.weight)
    assert weight.dtype == expected.weight.dtype
    assert state.keys() == expected.state.keys()
    for name, value in expected.state.items():
        assert torch.equal(state[name], value)
        assert state[name].dtype == value.dtype


def save_simple(directory, step=500, **changes):
    arguments = {"tables": [make_table("item", 10, 4, 1)], "dense": DENSE, "extra": {"step": step}, "keep_last": 3}
    return save(directory, step=step, **{**arguments, **changes})


def test_everything_comes_back(tmp_path):
    tables = [make_table("item", 10, 4, 1), make_table("user", 3, 8, 2, torch.float64)]
    extra = {"completed_steps": 500, "position": {"epoch": 2, "step_in_epoch": 17}, "learning_rate": 1e-3}
    path = save(tmp_path, step=500, tables=tables, dense=DENSE, extra=extra)
    found = latest_valid(tmp_path)
    assert found is not None
    assert found.path == path
    assert (found.step, found.extra, found.tables) == (500, extra, {"item": 10, "user": 3})
    for table in tables:
        assert_rows_equal(found.read_rows(table.name), table)
    dense = found.read_dense()
    assert dense.keys() == DENSE.keys()
    assert all(torch.equal(dense[name], value) for name, value in DENSE.items())


@st.composite
def grids(draw):
    """(rows, columns, cuts of the columns, cuts of the rows for each column piece): any grid of rectangles."""
    num_rows, dim = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    columns = sorted({0, dim, *draw(st.lists(st.integers(0, dim), max_size=3))})
    cuts = st.lists(st.integers(0, num_rows), max_size=3)
    rows = [sorted({0, num_rows, *draw(cuts)}) for _ in columns[1:]]
    return num_rows, dim, columns, rows


@given(
    grid=grids(),
    piece_rows=st.integers(1, 50),
    rows=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    read=st.tuples(st.integers(0, 6), st.integers(0, 6)),
)
def test_any_rectangle_can_be_read_from_any_grid(tmp_path_factory, grid, piece_rows, rows, read):
    num_rows, dim, columns, row_cuts = grid
    directory = tmp_path_factory.mktemp("pieces")
    table = make_table("item", num_rows, dim, num_rows)
    shards = [
        cut(table, start, stop, left, right)
        for left, right, edges in zip(columns, columns[1:], row_cuts, strict=False)
        for start, stop in itertools.pairwise(edges)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_format, "PIECE_BYTES", piece_rows * (3 * dim * 4 + 4))
        path = save(directory, step=1, tables=shards, dense={}, extra={})
    start, stop = sorted(min(edge, num_rows) for edge in rows)
    left, right = sorted(min(edge, dim) for edge in read)
    found = Checkpoint(path).read_rows("item", start, stop - start, left, right - left)
    assert_rows_equal(found, table, start, stop, left, right)
    # One value for each row is on disk once, whatever the columns.
    stored = [name for file in path.glob("table-*") for name in safe_open(file, "pt").keys()]  # noqa: SIM118
    assert stored.count("state.last_update_step") <= stored.count("weight")
    assert sum(
        safe_open(file, "pt").get_slice("state.last_update_step").get_shape()[0]
        for file in path.glob("table-*")
        if "state.last_update_step" in safe_open(file, "pt").keys()  # noqa: SIM118
    ) == num_rows  # fmt: skip


def test_an_attached_file_is_part_of_the_checkpoint(tmp_path):
    source = tmp_path / "ids.arrow"
    source.write_bytes(b"one two three")
    path = save_simple(tmp_path / "run", 10, attached={"ids-item.arrow": source})
    save_simple(tmp_path / "run", 20, attached={"ids-item.arrow": source})
    source.unlink()
    assert Checkpoint(path).attached("ids-item.arrow").read_bytes() == b"one two three"
    assert Checkpoint(path).attached("ids-user.arrow") is None
    (tmp_path / "run" / "step-000000000020" / "ids-item.arrow").unlink()
    with pytest.warns(RuntimeWarning, match=r"ids-item\.arrow"):
        assert latest_valid(tmp_path / "run").step == 10


def test_rows_outside_the_table_and_unknown_tables_are_named(tmp_path):
    found = Checkpoint(save_simple(tmp_path))
    with pytest.raises(CheckpointError, match=r"'item' has 10 rows, asked for \[8, 11\)"):
        found.read_rows("item", 8, 3)
    with pytest.raises(CheckpointError, match=r"'item' has 4 columns, asked for \[2, 5\)"):
        found.read_rows("item", 0, 3, 2, 3)
    with pytest.raises(CheckpointError, match=r"no table 'itme' \(there are item\)"):
        found.read_rows("itme")


def test_only_the_last_are_kept_and_an_abandoned_future_goes(tmp_path):
    for step in (10, 20, 30, 40):
        save_simple(tmp_path, step, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["step-000000000030", "step-000000000040"]
    save_simple(tmp_path, 35, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["step-000000000030", "step-000000000035"]


def test_a_step_can_be_saved_once_more(tmp_path):
    save_simple(tmp_path, 10, extra={"try": 1}, keep_last=2)
    save_simple(tmp_path, 10, extra={"try": 2}, keep_last=2)
    save_simple(tmp_path, 10, extra={"try": 3}, keep_last=2)
    assert latest_valid(tmp_path).extra == {"try": 3}
    assert len(os.listdir(tmp_path)) == 2
    for attempt in range(4, 13):
        save_simple(tmp_path, 10, extra={"try": attempt}, keep_last=2)
    assert latest_valid(tmp_path).extra == {"try": 12}, "the tenth comes after the second"


def test_what_a_killed_save_left_is_never_read_and_is_cleared(tmp_path):
    save_simple(tmp_path, 10)
    shutil.copytree(tmp_path / "step-000000000010", tmp_path / ".writing-left")
    assert latest_valid(tmp_path).step == 10
    save_simple(tmp_path, 20)
    assert not (tmp_path / ".writing-left").exists()


def test_a_file_of_an_unfinished_name_is_ignored(tmp_path):
    assert latest_valid(tmp_path) is None
    assert latest_valid(tmp_path / "absent") is None
    (tmp_path / "step-1").mkdir()
    assert latest_valid(tmp_path) is None


@pytest.mark.parametrize("kind", ["table-", "dense", "manifest"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "append", "delete"])
def test_damage_is_found_and_the_previous_checkpoint_used(tmp_path, kind, damage):
    save_simple(tmp_path, 10)
    newest = save_simple(tmp_path, 20)
    (file,) = [path for path in newest.iterdir() if path.name.startswith(kind)]
    raw = bytearray(file.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 1
    elif damage == "truncate":
        raw = raw[:-1]
    elif damage == "append":
        raw += b" "
    file.write_bytes(raw)
    if damage == "delete":
        file.unlink()
    with pytest.warns(RuntimeWarning, match=file.name):
        found = latest_valid(tmp_path)
    assert found is not None
    assert found.step == 10


def test_every_flipped_byte_of_a_small_checkpoint_is_found(tmp_path):
    path = save_simple(tmp_path, tables=[make_table("t", 2, 1, 0)], dense={})
    for file in path.iterdir():
        raw = file.read_bytes()
        for position in range(len(raw)):
            changed = bytearray(raw)
            changed[position] ^= 32
            file.write_bytes(changed)
            with pytest.raises(CheckpointError):
                Checkpoint(path).verify()
        file.write_bytes(raw)
    Checkpoint(path).verify()


def test_an_unknown_format_says_so(tmp_path):
    path = save_simple(tmp_path)
    file = path / checkpoint_format.MANIFEST_FILE
    body = json.loads(file.read_bytes())["manifest"]
    # As 1 was: without what later ones have.
    older = {name: value for name, value in body.items() if name != "attached"}
    for version, written in ((99, body), (1, older)):
        file.write_bytes(checkpoint_format._manifest_bytes({**written, "format_version": version}))
        with pytest.raises(CheckpointError, match=f"format version {version}, this version reads 2"):
            Checkpoint(path)
        # Whole as it is, it is not passed over: what was saved next would in time take its place.
        with pytest.raises(CheckpointError, match="start the training again in another run directory") as caught:
            latest_valid(tmp_path)
        failure = classify(caught.value)
        assert (failure.code, failure.retryable) == ("checkpoint", False)


def test_files_outside_the_checkpoint_are_never_opened(tmp_path):
    path = save_simple(tmp_path)
    file = path / checkpoint_format.MANIFEST_FILE
    body = json.loads(file.read_bytes())["manifest"]
    body["dense"]["file"] = "../elsewhere.safetensors"
    file.write_bytes(checkpoint_format._manifest_bytes(body))
    with pytest.raises(CheckpointError, match="outside its directory"):
        Checkpoint(path)


def test_nothing_is_pickled(tmp_path):
    for file in save_simple(tmp_path).iterdir():
        assert file.suffix in (".safetensors", ".json")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([cut(make_table("item", 10, 4, 1), 0, 9)], "rows from 9 are held nowhere"),
        ([cut(make_table("item", 10, 4, 1), 1, 10)], "rows from 0 are held nowhere"),
        ([make_table("item", 10, 4, 1), cut(make_table("item", 10, 4, 1), 5, 10)], "rows from 5 are held twice"),
        ([cut(make_table("item", 10, 4, 1), 0, 10, 0, 3)], "columns from 3 of rows from 0 are held nowhere"),
        ([cut(make_table("item", 10, 4, 1), 0, 10, 1, 4)], "rows from 0 are held nowhere"),
        (
            [cut(make_table("item", 10, 4, 1), 0, 10, 0, 3), cut(make_table("item", 10, 4, 1), 0, 10, 2, 4)],
            "rows from 0 are held twice",
        ),
        ([make_table("item", 10, 4, 1), make_table("item", 11, 4, 1)], "disagree about its size"),
        (
            [TableShard("item", 4, 0, torch.zeros(4, 2), {"sum": torch.zeros(4)}, dim=4)],
            "'sum' is one number for each row, but the columns are split",
        ),
    ],
)
def test_a_plan_that_misses_or_doubles_rows_is_refused(tmp_path, tables, message):
    with pytest.raises(CheckpointError, match=message):
        save_simple(tmp_path, tables=tables)
    assert os.listdir(tmp_path) == []


def test_extra_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="extra must be JSON"):
        save_simple(tmp_path, extra={"time": object()})
    with pytest.raises(CheckpointError, match="extra must be JSON"):
        save_simple(tmp_path, extra={"loss": float("nan")})


@pytest.mark.parametrize("rows", [20_000, 2_000])
def test_a_write_that_fails_leaves_the_previous_checkpoint(tmp_path, rows):
    save_simple(tmp_path, 10)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-000000000010").iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard))
    try:
        with pytest.raises(CheckpointError, match="free space"):
            save_simple(tmp_path, 20, tables=[make_table("item", rows, 4, 1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["step-000000000010"]
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "step-000000000010").iterdir()}
    assert latest_valid(tmp_path).step == 10


def fill_the_disk(folder):
    def write(step, rows):
        save(folder, step=step, tables=[TableShard("t", rows, 0, torch.ones(rows, 16), {})], dense={}, extra={})

    write(1, 1000)
    with pytest.raises(CheckpointError, match=r"(?s)No space left.*free space"):
        write(2, 100_000)
    assert [path.name for path in folder.iterdir()] == ["step-000000000001"]
    assert latest_valid(folder).step == 1
    write(3, 1000)
    print("SURVIVED")


@pytest.mark.process
def test_a_full_disk_is_a_clear_error_and_the_previous_checkpoint_stays(tmp_path):
    (tmp_path / "disk").mkdir()
    said = small_disk.run(tmp_path / "disk", "2m", tmp_path / "log.txt", fill_the_disk, tmp_path / "disk" / "run")
    assert said == (0, "SURVIVED\n")


def save_split(directory, step, plan, fail_on_rank=None):
    """Each rank saves its rows of the two tables; one of them may meet a limit on the size of files."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    tables = []
    for number, (name, kind) in enumerate(plan.items()):
        table = make_table(name, 101, 4, number)
        if kind == "row_wise":
            edges = [0, 51, 101] if world_size == 2 else [0, 101]
            tables.append(cut(table, edges[rank], edges[rank + 1]))
        elif number % world_size == rank:
            tables.append(table)
    if rank == fail_on_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (128, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        return str(save(directory, step=step, tables=tables, dense=DENSE if rank == 0 else {}, extra={"plan": plan}))
    except CheckpointError as error:
        return f"failed: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("plan", [{"a": "table_wise", "b": "row_wise"}, {"a": "row_wise", "b": "table_wise"}])
def test_ranks_write_one_checkpoint(ranks, tmp_path, world_size, plan):
    paths = ranks(world_size).run(save_split, str(tmp_path), 4, plan)
    assert set(paths) == {str(tmp_path / "step-000000000004")}
    found = latest_valid(tmp_path)
    for number, name in enumerate(plan):
        table = make_table(name, 101, 4, number)
        assert_rows_equal(found.read_rows(name), table)
        assert_rows_equal(found.read_rows(name, 40, 30), table, 40, 70)
    assert torch.equal(found.read_dense()["count"], DENSE["count"])


def save_nonsense_on(directory, rank):
    """One rank passes what is no tensor at all; the words that each rank is told."""
    import torch.distributed as dist

    table = make_table("item", 10, 4, 1)
    half = cut(table, 5 * dist.get_rank(), 5 * dist.get_rank() + 5)
    if dist.get_rank() == rank:
        half = TableShard(half.name, half.num_rows, half.row_start, half.weight, {"m": half.state["m"].tolist()})
    try:
        save(directory, step=1, tables=[half], dense={}, extra={})
    except CheckpointError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_fails_in_an_unforeseen_way_frees_the_others(ranks, tmp_path):
    for told in ranks(2).run(save_nonsense_on, str(tmp_path), 1):
        assert "rank 1: AttributeError" in told
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_cannot_write_fails_all_and_leaves_the_previous(ranks, tmp_path, failing):
    plan = {"a": "row_wise", "b": "row_wise"}
    ranks(2).run(save_split, str(tmp_path), 4, plan)
    told = ranks(2).run(save_split, str(tmp_path), 8, plan, failing)
    assert all(text.startswith("failed:") and f"rank {failing}" in text for text in told)
    assert os.listdir(tmp_path) == ["step-000000000004"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest_valid(tmp_path).step == 4
