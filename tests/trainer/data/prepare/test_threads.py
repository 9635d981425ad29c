"""Any number of threads writes the same bytes and raises the same error."""

from __future__ import annotations

import threading

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer.data.prepare.cases import Case, prepared_bytes, specs, write_rows
from trainer.data.columns import vocabulary
from trainer.data.errors import DataError
from trainer.data.prepare import encode, examples, numbers, table_rows
from trainer.data.prepare.preparation import prepare
from trainer.data.prepare.workers import Workers, num_threads
from trainer.data.sources.source import Source

CASES = st.builds(
    Case,
    format=st.sampled_from(("parquet", "csv", "feather")),
    label=st.sampled_from(("column", "rule", "value", "negatives")),
    split=st.sampled_from(("random", "time", "per_user_last", "column")),
    model=st.sampled_from(("dcnv2", "bpr", "sasrec")),
    joined=st.booleans(),
    history=st.booleans(),
    weighted=st.booleans(),
    bad_rows=st.booleans(),
    warm_start=st.booleans(),
    capacity=st.booleans(),
    strings=st.booleans(),
    vectors=st.booleans(),
    filtered=st.booleans(),
    num_rows=st.integers(100, 250),
    seed=st.integers(0, 1 << 20),
)


@pytest.fixture
def small_pieces(monkeypatch):
    """Many chunks, merges and pieces where data are small."""
    monkeypatch.setattr(Source.stream, "__defaults__", (41,))
    monkeypatch.setattr(vocabulary, "_LEAST_MERGE", 9)
    monkeypatch.setattr(examples, "CHUNK_ROWS", 53)
    monkeypatch.setattr(table_rows, "_PIECE_ROWS", 64)
    monkeypatch.setattr(numbers, "_PIECE_VALUES", 64)


@pytest.mark.slow
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=CASES)
def test_any_number_of_threads_and_any_memory_writes_the_same_bytes(case, small_pieces, tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    write_rows(case, folder)
    one = prepared_bytes(case, folder, 1)
    for threads in (2, 3):
        assert prepared_bytes(case, folder, threads) == one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "IDS_BYTES", 400)
        assert prepared_bytes(case, folder, 2, folder / "ids in runs on disk") == one


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_first_chunk_with_an_error_is_named_and_in_it_the_first_column(threads, small_pieces, tmp_path):
    """Bad numbers, labels and ids in later chunks are as many as threads could stumble over first."""
    case = Case(joined=False, history=False, weighted=False)
    write_rows(case, tmp_path)
    table = pq.read_table(tmp_path / "rows" / "a.parquet")
    price, click = table["price"].to_pylist(), table["click"].to_pylist()
    price[30], click[20] = float("inf"), 7  # in the first 41 rows, a chunk, in which numbers come before labels
    price[45], click[42] = float("inf"), 9
    for name, column in (("price", price), ("click", click)):
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(column))
    pq.write_table(table, tmp_path / "rows" / "a.parquet")
    dataset, job = specs(case, tmp_path)
    with pytest.raises(DataError, match=r"a\.parquet, column 'price', row 30: feature 'price' is inf: no finite"):
        prepare(dataset, job, tmp_path / "data", threads=threads)
    assert not (tmp_path / "data").exists()


def test_workers_return_in_order_and_raise_what_failed_first_in_order():
    with Workers(3) as workers:
        assert workers.map(lambda number: number * number, range(50)) == [number * number for number in range(50)]
        late, ended = threading.Event(), []

        def work(number: int) -> None:
            if number == 0:
                late.wait(30)
            try:
                if number < 2:
                    raise ValueError(str(number))
            finally:
                ended.append(number)
                late.set()

        with pytest.raises(ValueError, match=r"^0$"):
            workers.map(work, range(9))
        assert sorted(ended) == list(range(9))


def test_threads_are_the_cores_of_the_job_and_at_most_those_of_the_process(job_spec, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    assert num_threads(job_spec()) == 1
    assert num_threads(job_spec(resources={"num_workers": 2, "cpus_per_worker": 1.5})) == 3
    assert num_threads(job_spec(resources={"num_workers": 2, "cpus_per_worker": 4})) == 6
