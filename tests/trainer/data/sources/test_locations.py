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
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.locations import FILE_SYSTEMS
from trainer.data.sources.source import HIVE_NULL, Source
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job
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
    [("rows/nothing", "no such file"), ("nobucket/rows", "no such file|did not give"), ("rows/bad", "as Parquet")],
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
    assert data.vocabulary("hour").to_pylist() == [7, 11]
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
