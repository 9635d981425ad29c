"""Dynamic tables: raw ids against tables of known ids, rows that go from one id to another, resumes, memory, errors."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from embeddings.dynamic.settings import FIRST_ROW, UNKNOWN_ROW, IdMapSettings
from embeddings.dynamic.tables import DynamicTables
from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import SGD, Adagrad, Adam, AdamAR, RowwiseAdagrad
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import InitConfig, TableConfig
from embeddings.tables.initialization import initial_rows_of

DIM = 8
RAW = np.array([2**62, -5, 7, 0, -(2**63), 123456789, 31, 32], dtype=np.int64)
OPTIMIZERS = [SGD(0.1), Adagrad(0.1), RowwiseAdagrad(0.1), Adam(0.01, moments="lazy"), AdamAR(0.01, alpha=0.01)]


def table(settings, name="item", features=("item", "history"), **more):
    pooling = {"pooling": "mean"} | more
    return TableConfig(name, settings.num_rows, DIM, features, init=InitConfig("hash", 0.1), grows=True, **pooling)


def make(settings, optimizer=None, backend="cpu", **options):
    return DynamicTables(
        {"item": settings}, [table(settings)], optimizer or AdamAR(0.01, alpha=0.01), backend=backend, **options
    )


def batch(generator, raw=RAW, size=6):
    lengths = generator.integers(0, 4, 2 * size)
    ids = torch.from_numpy(generator.choice(raw, int(lengths.sum())))
    return ids, torch.from_numpy(np.append(0, np.cumsum(lengths)))


def train(tables, batches, first_step=1):
    for step, (ids, offsets) in enumerate(batches, first_step):
        output = tables(ids, offsets)
        (output.sin() * torch.arange(1.0, 1 + output.shape[1])).sum().backward()
        tables.step(step)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_equals_tables_that_knew_all_ids_beforehand(optimizer, backend):
    """Rows, state and lookups, bit by bit: which row an id has does not matter, nor when it came."""
    generator = np.random.default_rng(0)
    batches = [batch(generator, RAW[: 2 + step // 3]) for step in range(24)]
    dynamic = make(IdMapSettings(capacity=20), optimizer, backend, seed=3)
    keys = np.concatenate([np.zeros(2, dtype=np.uint64), RAW.view(np.uint64)])
    known = EmbeddingTables(
        [TableConfig("item", 10, DIM, ("item", "history"), "mean", InitConfig("hash", 0.1), row_keys=keys)],
        optimizer, backend=backend, seed=3,
    )  # fmt: skip
    row_of = {int(raw): FIRST_ROW + i for i, raw in enumerate(RAW)}
    for step, (ids, offsets) in enumerate(batches, 1):
        rows = torch.tensor([row_of[int(raw)] for raw in ids], dtype=torch.int64)
        outputs = dynamic(ids, offsets), known(rows, offsets)
        assert torch.equal(*outputs)
        for tables, output in zip((dynamic, known), outputs, strict=True):
            (output.sin() * torch.arange(1.0, 1 + output.shape[1])).sum().backward()
            tables.step(step)
    raw, _ = dynamic.vectors("item")
    assert sorted(raw.tolist()) == sorted(row_of)
    mine = torch.from_numpy(dynamic.ids["item"].find(RAW)) + FIRST_ROW
    assert torch.equal(dynamic.tables.read("item", mine), known.read("item", torch.arange(2, 10)))
    for name, state in known.state("item").items():
        assert torch.equal(dynamic.tables.state("item")[name][mine], state[2:]), name


def test_a_row_that_changes_hands_starts_anew_and_no_other_moves():
    tables = make(IdMapSettings(capacity=3, ttl_steps=8), seed=1)
    offsets = torch.tensor([0, 1, 1, 3, 3])
    train(tables, [(torch.tensor([10, 11, 12]), offsets)] * 3)
    train(tables, [(torch.tensor([10, 10, 11]), offsets)] * 9, first_step=4)
    before = copy.deepcopy(tables)
    tables(torch.tensor([10, 99, 99]), offsets)
    assert tables.take_gone("item").tolist() == [12]
    assert tables.take_gone("item").tolist() == []
    # The row of 12, which came third.
    row = FIRST_ROW + 2
    assert tables.rows_of(torch.tensor([99]), torch.tensor([0, 1, 1])).tolist() == [row]
    config = tables.tables.layout.tables[0]
    expected = torch.from_numpy(initial_rows_of(config, 1, np.array([99], dtype=np.uint64))).float()[0]
    assert torch.equal(tables.tables.weight("item")[row], expected)
    assert expected.abs().sum() > 0
    for name, state in tables.tables.state("item").items():
        assert not state[row].any(), name
        assert bool(before.tables.state("item")[name][row].any())
    others = [each for each in range(config.num_rows) if each != row]
    assert torch.equal(tables.tables.weight("item")[others], before.tables.weight("item")[others])
    for name, state in tables.tables.state("item").items():
        assert torch.equal(state[others], before.tables.state("item")[name][others]), name


def test_an_id_that_comes_back_is_a_new_one():
    tables = make(IdMapSettings(capacity=2, ttl_steps=8), seed=1)
    one, offsets = torch.tensor([10]), torch.tensor([0, 1, 1])
    first = tables(one, offsets).detach().clone()
    train(tables, [(one, offsets)])
    assert not torch.equal(tables(one, offsets), first)
    tables.tables.discard()
    train(tables, [(torch.tensor([11]), offsets)] * 16, first_step=2)
    assert tables.take_gone("item").tolist() == [10]
    assert torch.equal(tables(one, offsets), first)


def test_evaluation_changes_nothing_and_unknown_ids_share_a_row():
    tables = make(IdMapSettings(capacity=5, admission_threshold=2))
    offsets = torch.tensor([0, 1, 2, 2, 2])
    train(tables, [(torch.tensor([4, 4]), offsets), (torch.tensor([4, 9]), offsets)])
    tables.eval()
    before = tables.state_for_checkpoint()
    output = tables(torch.tensor([4, 77]), offsets)[:, :DIM]
    assert torch.equal(tables.rows_of(torch.tensor([4, 77]), offsets), torch.tensor([FIRST_ROW, UNKNOWN_ROW]))
    assert torch.equal(output[1], tables.tables.read("item", torch.tensor([UNKNOWN_ROW]))[0])
    # The row of unknown ids learns: 4 and 9 read it at their first occurrences.
    assert int(tables.tables.state("item")["last_update_step"][UNKNOWN_ROW]) == 2
    after = tables.state_for_checkpoint()
    assert all(np.array_equal(before["ids"]["item"][name], after["ids"]["item"][name]) for name in after["ids"]["item"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_resumes_with_the_same_bits(optimizer):
    generator = np.random.default_rng(1)
    raw = generator.integers(-(2**63), 2**63 - 1, 60)
    batches = [batch(generator, raw[max(0, step - 12) : step + 8]) for step in range(40)]
    settings = IdMapSettings(capacity=25, admission_threshold=2, ttl_steps=9)
    whole = make(settings, optimizer)
    train(whole, batches)
    assert len(whole.take_gone("item"))
    part = make(settings, optimizer)
    train(part, batches[:19])
    state = part.state_for_checkpoint()
    # Into new tables, and into some that have gone further.
    used = make(settings, optimizer)
    train(used, batches[::-1][:30])
    used(*batches[0]).sum().backward()
    for tables in (make(settings, optimizer), used):
        tables.load(copy.deepcopy(state))
        train(tables, batches[19:], first_step=20)
        expected, found = whole.state_for_checkpoint(), tables.state_for_checkpoint()
        for name, values in expected["ids"]["item"].items():
            assert np.array_equal(values, found["ids"]["item"][name]), name
        for name, values in expected["tables"]["item"].items():
            assert torch.equal(values, found["tables"]["item"][name]), name
        assert found["completed_steps"] == 40


def test_who_lost_a_row_before_a_checkpoint_is_told_after_it():
    offsets = torch.tensor([0, 1, 1])
    tables, resumed = (make(IdMapSettings(capacity=2)) for _ in range(2))
    train(tables, [(torch.tensor([raw]), offsets) for raw in (10, 11, 12)])
    state = tables.state_for_checkpoint()
    resumed.load(state)
    for each in (tables, resumed):
        train(each, [(torch.tensor([13]), offsets)], first_step=4)
    gone = tables.take_gone("item").tolist()
    assert len(gone) == 2
    assert resumed.take_gone("item").tolist() == gone
    # A state of an earlier release has none of them.
    resumed.load({name: part for name, part in state.items() if name != "gone"})
    assert resumed.take_gone("item").tolist() == []


def test_dynamic_tables_stand_beside_others():
    settings = IdMapSettings(capacity=10)
    fixed = TableConfig("country", 5, 3, ("country",))
    tables = DynamicTables({"item": settings}, [fixed, table(settings)], SGD(0.1), seed=2)
    ids, offsets = torch.tensor([4, 3, 100, 200, 200]), torch.tensor([0, 1, 2, 3, 4, 4, 5])
    assert torch.equal(tables.rows_of(ids, offsets), torch.tensor([4, 3, 2, 3, 3]))
    assert tables(ids, offsets).shape == (2, 3 + 2 * DIM)
    assert torch.equal(tables.rows_of(torch.empty(0, dtype=torch.int64), torch.tensor([0])), torch.empty(0).long())


@pytest.mark.parametrize("part", ["rows", "columns"])
def test_shards_renew_their_part(part):
    """What ranks that split the rows, or the columns, do with the same ids: together they hold the whole."""
    settings = IdMapSettings(capacity=8)
    whole = table(settings, features=("item",))
    keys = np.array([5, 2**63 + 1, 77], dtype=np.uint64)
    rows = torch.tensor([2, 6, 9])
    tables = EmbeddingTables([whole], SGD(0.1), seed=4)
    tables.renew("item", rows, keys)
    weight = tables.weight("item")
    assert bool((weight[rows] != 0).all())
    assert not weight[[0, 3, 4, 5, 7, 8]].any()
    assert weight[1].any()
    common = {"name": "item", "num_rows": 10, "features": ("item",), "init": whole.init, "grows": True}
    for start in (0, 5):
        if part == "rows":
            shard = TableConfig(**common, dim=DIM, row_start=start, row_count=5)
            mine = (rows >= start) & (rows < start + 5)
            expected = weight[start : start + 5]
        else:
            shard = TableConfig(**common, dim=3 if start else 5, column_start=start, total_dim=DIM)
            mine = torch.ones(3, dtype=torch.bool)
            expected = weight[:, start : start + (3 if start else 5)]
            start = 0
        held = EmbeddingTables([shard], SGD(0.1), seed=4)
        held.renew("item", rows[mine] - start, keys[mine.numpy()])
        assert torch.equal(held.weight("item"), expected)


def test_what_the_guide_shows_runs():
    """docs/guides/dynamic_tables.md."""
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "dynamic_tables.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    found: dict = {}
    exec(code, found)
    assert found["raw"].tolist() == [17]
    assert found["vectors"].shape == (1, 16)


MEMORY = """
import numpy as np, torch
from embeddings.tables.config import InitConfig, TableConfig
from embeddings.dynamic.settings import IdMapSettings
from embeddings.dynamic.tables import DynamicTables
from embeddings.optim import Adam

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

settings = IdMapSettings(capacity=40_000_000)
config = TableConfig("item", settings.num_rows, 64, ("item",), init=InitConfig("hash"), grows=True)
before = resident()
tables = DynamicTables({"item": settings}, [config], Adam(0.01))
for step in range(1, 4):
    ids = torch.from_numpy(np.random.default_rng(step).integers(0, 2**60, 1000))
    tables(ids, torch.arange(1001)).sum().backward()
    tables.step(step)
print((resident() - before) >> 20, tables.tables.layout.weights.nbytes >> 30)
"""


@pytest.mark.process
def test_memory_is_taken_as_rows_are_given_out():
    """Forty million rows of 64 with Adam's state, 31 GB, of which 3000 are somebody's: a tenth of a GB with all that
    compiled code and the first step take."""
    found = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    mebibytes, gibibytes = map(int, found.stdout.split())
    assert gibibytes >= 9
    assert mebibytes < 512


def test_errors_say_what_is_wrong():
    settings = IdMapSettings(capacity=10)
    good = table(settings)
    with pytest.raises(ValueError, match="its settings need 12 rows and grows=True"):
        DynamicTables({"item": settings}, [TableConfig("item", 12, DIM, ("item",))], SGD(0.1))
    with pytest.raises(ValueError, match="has 12 rows and grows=True, but its settings need 7 rows"):
        DynamicTables({"item": IdMapSettings(capacity=5)}, [good], SGD(0.1))
    with pytest.raises(ValueError, match="its settings are not given"):
        DynamicTables({}, [good], SGD(0.1))
    with pytest.raises(ValueError, match="settings names tables \\['user'\\], which do not exist"):
        DynamicTables({"item": settings, "user": settings}, [good], SGD(0.1))
    with pytest.raises(ValueError, match="rows 0 and 1 must be padding and unknown ids"):
        DynamicTables({"item": settings}, [table(settings, first_live_row=0)], SGD(0.1))
    with pytest.raises(ValueError, match="SSE could draw a row without an id"):
        DynamicTables({"item": settings}, [good], SGD(0.1), sse={"item": SSEConfig(0.1)})
    with pytest.raises(ValueError, match="a row's number does not determine its id"):
        TableConfig("item", 12, DIM, ("item",), init=InitConfig("normal"), grows=True)
    tables = make(settings)
    with pytest.raises(ValueError, match="raw ids must be int64"):
        tables(torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match="offsets must be"):
        tables(torch.tensor([1]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="can't renew rows 3 to 12"):
        tables.tables.renew("item", torch.tensor([3, 12]), np.zeros(2, dtype=np.uint64))


def test_a_state_that_does_not_fit_changes_nothing():
    tables = make(IdMapSettings(capacity=10))
    offsets = torch.tensor([0, 1, 1])
    train(tables, [(torch.tensor([4]), offsets)])
    state = tables.state_for_checkpoint()
    before = tables.vectors("item")
    wrong = copy.deepcopy(state)
    wrong["tables"]["item"]["weight"] = wrong["tables"]["item"]["weight"][:-1]
    with pytest.raises(ValueError, match="table 'item': the state has rows of"):
        tables.load(wrong)
    wrong = copy.deepcopy(state)
    wrong["ids"]["item"]["free"] = np.array([0], dtype=np.int32)
    with pytest.raises(ValueError, match="do not agree"):
        tables.load(wrong)
    with pytest.raises(ValueError, match="the state is of tables"):
        tables.load({**state, "tables": {}})
    after = tables.vectors("item")
    assert np.array_equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
