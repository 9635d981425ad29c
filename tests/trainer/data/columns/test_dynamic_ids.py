"""Which id each row stands for along a chain of warm starts: nothing moves, nothing stays for ever."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, IdMap, grow
from trainer.data.columns.vocabulary import Codes
from trainer.data.prepare.preparation import prepare

AS_IDS = {
    "int": lambda numbers: pa.array(numbers, pa.int64()),
    "string": lambda numbers: pa.array([f"id {number}" for number in numbers], pa.large_string()),
}


def run(base, in_training, held_out=(), limit=None, kind="int"):
    """A run whose training split has these ids, and whose held-out rows have the others too."""
    ids = AS_IDS[kind](sorted({*in_training, *held_out}))
    if kind == "string":
        ids = ids.take(pc.array_sort_indices(ids))
    trained = set(AS_IDS[kind](list(in_training)).to_pylist())
    counts = np.array([3 * (id_ in trained) for id_ in ids.to_pylist()], dtype=np.int64)
    return grow(base, Codes(ids), counts, limit), ids.to_pylist(), trained


days = st.lists(
    st.tuples(st.sets(st.integers(-5, 25), min_size=1, max_size=12), st.sets(st.integers(-5, 25), max_size=4)),
    min_size=1,
    max_size=8,
)


@given(days=days, limit=st.one_of(st.none(), st.integers(1, 4)), kind=st.sampled_from(["int", "string"]))
def test_a_chain_of_runs(days, limit, kind):
    base, last_seen, tombstones = None, {}, {}
    for number, (in_training, held_out) in enumerate(days, start=1):
        grown, ids, trained = run(base, in_training, held_out, limit, kind)
        before = [] if base is None else base.ids.to_pylist()
        after = grown.ids.ids.to_pylist()
        last_seen |= dict.fromkeys(trained, number)
        alive = {id_ for id_, seen in last_seen.items() if limit is None or number - seen < limit}
        # Ids that stay keep their order, new ones follow in theirs.
        stayed = [id_ for id_ in before if id_ in alive]
        assert after == stayed + sorted(trained - set(before))
        assert dict(zip(after, grown.ids.last_seen.tolist(), strict=True)) == {id_: last_seen[id_] for id_ in after}
        assert grown.ids.run == number
        # Each row continues the row of its own id, or none.
        assert grown.num_rows == len(after) + NUM_SPECIAL_ROWS
        assert grown.parent_rows[:2].tolist() == [0, 1]
        for id_, parent in zip(after, grown.parent_rows[2:].tolist(), strict=True):
            assert parent == (before.index(id_) + 2 if id_ in before else -1)
        # Codes of the data become the rows of their ids; the unknown row where there is none.
        expected = [after.index(id_) + 2 if id_ in after else 1 for id_ in ids] + [1]
        assert grown.row_of_code.tolist() == expected
        # Tombstones: of what was given up, until it comes back or is forgotten.
        tombstones |= dict.fromkeys(set(before) - alive, number)
        remembered = {id_ for id_, since in tombstones.items() if limit is None or number - since < limit}
        tombstones = {id_: since for id_, since in tombstones.items() if id_ in remembered - set(after)}
        assert dict(zip(grown.ids.retired.to_pylist(), grown.ids.retired_in.tolist(), strict=True)) == tombstones
        base = grown.ids
    if limit is not None:
        distinct = set().union(*(in_training for in_training, _ in days[-limit:]))
        assert len(base.ids) == len(distinct)


@pytest.mark.parametrize("kind", ["int", "string"])
def test_a_map_comes_back_from_its_file(tmp_path, kind):
    first = run(None, [3, 1, 2], kind=kind)[0].ids
    second = run(first, [2, 9], limit=1, kind=kind)[0].ids
    second.write(tmp_path / "ids.arrow")
    found = IdMap.read(tmp_path / "ids.arrow")
    assert found.ids.equals(second.ids)
    assert found.retired.equals(second.retired)
    assert len(found.retired) == 2
    assert (found.run, found.last_seen.tolist(), found.retired_in.tolist()) == (2, [2, 2], [2, 2])


def test_ten_refreshes_of_a_sliding_window_stay_bounded(clicks, dataset_spec, job_spec, tmp_path):
    """Half of the items is replaced every day; without a limit the table would hold all that there ever were."""

    def day(number):
        table = clicks(200, seed=number)
        items = pa.array(np.random.default_rng(number).integers(0, 40, 200) + 20 * number)
        return dataset_spec(table.set_column(table.column_names.index("item"), "item", items))

    sizes, endless = [], []
    for limit, into in ((2, sizes), (None, endless)):
        base, seen = None, []
        for number in range(10):
            job = job_spec(init_from={"job": "before", "retire_after_runs": limit})
            data = prepare(day(number), job, tmp_path / f"{limit}-{number}", base_vocabulary=base)
            into.append(data.tables["item"].num_rows)
            base = {name: data.id_map(name) for name in data.tables}
            counts = data.row_counts("item")
            seen.append(set(data.vocabulary("item").to_numpy()[counts[2:] > 0].tolist()))
            if limit is not None:
                assert set(data.vocabulary("item").to_pylist()) == set().union(*seen[-limit:])
                # Tombstones are bounded too: those of the last runs alone.
                assert set(base["item"].retired.to_pylist()) == set().union(*seen[-2 * limit : -limit]) - set().union(
                    *seen[-limit:]
                )
    assert max(sizes) <= 40 + 20 + NUM_SPECIAL_ROWS
    assert endless[-1] > 180


def test_the_limit_and_what_was_seen_are_part_of_what_is_reused(clicks, dataset_spec, job_spec, tmp_path):
    dataset = dataset_spec(clicks(200))
    base = {"item": IdMap(pa.array([1, 2, 77_777]), np.array([4, 4, 1], dtype=np.int32), 4)}
    base["user"] = IdMap(pa.array(range(3, 213, 7)))
    told = []
    for limit in (4, 5, None, None):
        job = job_spec(init_from={"job": "before", "retire_after_runs": limit})
        data = prepare(dataset, job, tmp_path / "data", base_vocabulary=base, log=told.append)
        assert (77_777 in data.vocabulary("item").to_pylist()) == (limit != 4)
    assert sum("prepared data reused" in message for message in told) == 1
    assert "ids of item: 2 of 3 are kept (2 without an example in this run), 1 retired" in next(
        message for message in told if message.startswith("ids of item")
    )
