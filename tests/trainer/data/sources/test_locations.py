"""Rows in partitioned directories, here and in object storage (a real S3 server): the same data from both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from tests.contracts import store_servers
from tests.trainer.data.sources.readers.test_formats import WRITERS, rows_table
from trainer.data.batches.prepared import PreparedData
from trainer.data.errors import DataError
from trainer.data.one_pass import windows
from trainer.data.one_pass.data import OnePassData
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.followed_folder import FollowedFolder, first_file
from trainer.data.sources.locations import FILE_SYSTEMS, ObjectPath, Stat, is_still
from trainer.data.sources.source import HIVE_NULL, Source
from trainer.spec import DatasetSpec, Follow, JobSpec, parse_dataset, parse_job
from trainer.spec.uri_schemes import OBJECTS

DAYS = ("2026-01-01", "2026-01-02", "2026-01-10")
FEATURES = {
    "user": {"type": "id"},
    "item": {"type": "id"},
    "country": {"type": "id"},
    "brand": {"type": "id", "join": {"uri": "brands.csv", "on": "item", "column": "brand"}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store_servers.CREDENTIALS.items():
            patch.setenv(name, value)
        with store_servers.s3_server("rows") as address:
            patch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
            yield address


def write_days(folder: Path, days: tuple[str, ...] = DAYS, rows: int = 80) -> Path:
    """``date=D/country=C/part-N.parquet`` with string ids, and the brands of items beside the folder."""
    for number, day in enumerate(days):
        for country in ("de", "fr%20x"):
            generator = np.random.default_rng([DAYS.index(day), country == "de"])
            table = pa.table(
                {
                    "user": [f"u{one}" for one in generator.integers(0, 15, rows)],
                    "item": [f"i{one}" for one in generator.integers(0, 25, rows)],
                    "click": generator.integers(0, 2, rows),
                }
            )
            place = folder / f"date={day}" / f"country={country}"
            place.mkdir(parents=True)
            pq.write_table(table, place / f"part-{number}.parquet")
    brands = pa.table({"item": [f"i{one}" for one in range(25)], "brand": [f"b{one % 4}" for one in range(25)]})
    pyarrow.csv.write_csv(brands, folder.parent / "brands.csv")
    return folder


def upload(address: str, local: Path, key: str) -> None:
    files = pafs.S3FileSystem(endpoint_override=address, scheme="http", allow_bucket_creation=True)
    pafs.copy_files(str(local), key, destination_filesystem=files)


def specs(uri: str, **dataset: object) -> tuple[DatasetSpec, JobSpec]:
    described = {
        "name": "days", "uri": uri, "features": FEATURES, "label": {"column": "click"}, "partition": "date", **dataset,
    }  # fmt: skip
    job = {"name": "j", "dataset": {"name": "days"}, "model": {"kind": "dnn"}, "batch_size": 32}
    return parse_dataset(described), parse_job(job)


def contents(data: PreparedData) -> dict[str, bytes]:
    return {str(path.relative_to(data.directory)): path.read_bytes() for path in data.directory.rglob("*.bin")}


def test_every_scheme_of_object_storage_has_a_file_system() -> None:
    assert {*FILE_SYSTEMS} == {*OBJECTS}


@pytest.mark.process
def test_object_storage_gives_what_a_directory_gives(server, tmp_path):
    local = write_days(tmp_path / "source" / "days")
    upload(server, tmp_path / "source", "rows/own")
    here = prepare(*specs(str(local)), tmp_path / "here")
    there = prepare(*specs("s3://rows/own/days"), tmp_path / "there")
    assert contents(there) == contents(here)
    assert there.vocabulary("country").to_pylist() == ["de", "fr x"]
    assert there.vocabulary("brand").to_pylist() == ["b0", "b1", "b2", "b3"]
    assert there.dataset_fingerprint == here.dataset_fingerprint
    # The same again is reused; a file more is not.
    logged: list[str] = []
    prepare(*specs("s3://rows/own/days"), tmp_path / "there", log=logged.append)
    assert any("reused" in line for line in logged)


@pytest.mark.process
def test_a_window_reads_its_days_alone(server, tmp_path):
    write_days(tmp_path / "source" / "days")
    upload(server, tmp_path / "source", "rows/window")
    dataset, job = specs("s3://rows/window/days")
    window = {"name": "days", "window": {"start": "2026-01-02", "days": 2}}
    data = prepare(dataset, parse_job(job.model_dump(mode="json") | {"dataset": window}), tmp_path / "data")
    assert data.num_rows_read == 2 * 2 * 80


@pytest.mark.process
@pytest.mark.parametrize(
    ("key", "says"),
    [("rows/nothing", "no such file"), ("nobucket/rows", "no such file|did not return"), ("rows/bad", "as Parquet")],
)
def test_what_is_wrong_is_told_with_the_object(server, tmp_path, key, says):
    if key == "rows/bad":
        write_days(tmp_path / "bad", ("2026-01-01",))
        (broken, *_) = sorted((tmp_path / "bad").rglob("*.parquet"))
        broken.write_bytes(broken.read_bytes()[:200])
        upload(server, tmp_path / "bad", key)
        upload(server, tmp_path / "brands.csv", "rows/brands.csv")
    with pytest.raises(DataError, match=says) as raised:
        prepare(*specs(f"s3://{key}"), tmp_path / "data")
    assert raised.value.where.startswith(f"s3://{key}")


@pytest.mark.process
@pytest.mark.parametrize("name", ["rows.csv.gz", *WRITERS])
def test_every_format_from_object_storage(server, tmp_path, name):
    table = rows_table().drop_columns(["tags"])
    if name.endswith(".csv.gz"):
        with pa.output_stream(tmp_path / name) as stream:
            pyarrow.csv.write_csv(table, stream)
    else:
        WRITERS[name](table, tmp_path / name)
    upload(server, tmp_path / name, f"rows/formats/{name}")
    columns = ["user", "item", "price"]
    chunks = list(Source(f"s3://rows/formats/{name}").stream(columns))
    assert pa.Table.from_batches([chunk.batch for chunk in chunks]).equals(table.select(columns))


@pytest.mark.process
def test_a_followed_prefix_without_objects_is_an_empty_folder(server, tmp_path):
    """Before the first one, and once they were taken away behind the job; a bucket must be there."""
    assert first_file("s3://rows/log", Follow()) is None
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    upload(server, tmp_path / "a.parquet", "rows/log/a.parquet")
    folder = FollowedFolder("s3://rows/log", Follow(poll_seconds=0.01))
    assert folder.next(0).name == "a.parquet"
    FILE_SYSTEMS["s3"]().delete_file("rows/log/a.parquet")
    assert folder.next(1) is None
    assert folder.figures(0)["files_behind"] == 0
    with pytest.raises(DataError, match="no such file"):
        first_file("s3://nobucket/log", Follow())


@pytest.mark.process
@pytest.mark.parametrize("how", ["followed", "there"])
def test_an_object_that_changes_while_it_is_read_is_refused(server, tmp_path, how, monkeypatch):
    """In a folder that is followed, and among files that are all there."""
    monkeypatch.setattr(windows, "WINDOW_ROWS", 1)
    numbers = np.arange(600_000)
    table = pa.table({"user": numbers, "item": numbers, "click": numbers % 2})
    for name, rows in (("a", table), ("b", table.slice(1))):
        pq.write_table(rows, tmp_path / f"{name}.parquet", row_group_size=100_000)
    upload(server, tmp_path / "a.parquet", f"rows/{how}/a.parquet")
    one_pass = {"name": "days", "one_pass": True} | ({"follow": {"max_rows": 600_000}} if how == "followed" else {})
    dataset, _ = specs(f"s3://rows/{how}", features={"user": {"type": "id"}, "item": {"type": "id"}}, partition=None)
    job = parse_job({
        "name": "j", "dataset": one_pass, "model": {"kind": "dnn"}, "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "evaluation": {"split": {"validation": 0, "test": 0} if how == "followed" else {"kind": "random"}},
        "tables": {"user": {"capacity": 100}, "item": {"capacity": 100}},
    })  # fmt: skip
    read = OnePassData.of(prepare(dataset, job, tmp_path / "data").directory, dataset, job).all_windows()
    next(read)
    upload(server, tmp_path / "b.parquet", f"rows/{how}/a.parquet")
    with pytest.raises(DataError, match=rf"s3://rows/{how}/a.parquet: has changed since (its reading|the run) began"):
        list(read)


def test_times_of_objects_are_compared_in_whole_seconds():
    """A list of objects may tell more than a look at one."""
    path = ObjectPath("s3", "rows/a.parquet", Stat(3, 5 * 10**9))
    assert is_still(path, 3, 5 * 10**9 + 123_000_000)
    assert not is_still(path, 3, 6 * 10**9)
    assert not is_still(path, 4, 5 * 10**9)


# --- directories -----------------------------------------------------------------------------------------------------


def test_the_order_of_files_is_that_of_their_names(tmp_path):
    """Whatever the order in which they were written and the file system lists them."""
    first, second = write_days(tmp_path / "a"), write_days(tmp_path / "b", DAYS[::-1])
    for folder in (first, second):
        for path in folder.rglob("*.parquet"):
            path.rename(path.with_name("rows.parquet"))
    names = [file.path.relative_to(first).parts for file in Source(str(first)).files]
    assert names == sorted(names)
    assert [file.path.relative_to(second).parts for file in Source(str(second)).files] == names
    data = [prepare(*specs(str(folder)), tmp_path / f"data-{folder.name}") for folder in (first, second)]
    assert contents(data[0]) == contents(data[1])


def test_columns_of_folders_are_features(tmp_path):
    folder = write_days(tmp_path / "days")
    features = {**FEATURES, "day": {"type": "id", "column": "date"}, "hour": {"type": "id"}}
    for path in sorted(folder.rglob("country=*")):
        for hour in (7, 11):
            (path / f"hour={hour:02d}").mkdir()
            shutil.copy(next(path.glob("*.parquet")), path / f"hour={hour:02d}")
        next(path.glob("*.parquet")).unlink()
    data = prepare(*specs(str(folder), features=features), tmp_path / "data")
    assert data.vocabulary("day").to_pylist() == list(DAYS)
    assert data.vocabulary("hour").to_pylist() == ["07", "11"]
    counts = data.row_counts("hour")[2:]
    assert counts.sum() == data.num_examples["train"]
    assert min(counts) > 0


def test_the_folder_of_nulls_is_the_unknown_id(tmp_path):
    folder = write_days(tmp_path / "days")
    for path in sorted(folder.rglob("country=de")):
        path.rename(path.with_name(f"country={HIVE_NULL}"))
    data = prepare(*specs(str(folder)), tmp_path / "data")
    assert data.vocabulary("country").to_pylist() == ["fr x"]
    assert data.row_counts("country")[1] > 0
