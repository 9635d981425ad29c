"""Nothing that a user sends is executed, no file reaches beyond what it may, and none ends the service by its size."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.core.settings import Settings
from service.datasets import parquet_limits
from tests.service.service_kit import job_body
from trainer.spec import SpecError, load_documents, yaml_documents

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "text",
    [
        "name: !!python/object/apply:os.system ['touch MARK']",
        "name: !!python/name:os.system",
        "!!python/object/new:subprocess.Popen [['touch', 'MARK']]",
        "name: !include /etc/passwd",
        "name: a\nname: b",
        "model: {kind: dnn, kind: bpr}",
        "a: &a {b: 1, <<: *a}",
        "a: &a {<<: &b {<<: *a}}",
        "a: &a {" + ", ".join(f"k{n}: 1" for n in range(1001)) + "}\nb: {<<: *a}",
        "a: &a {" + ", ".join(f"k{n}: 1" for n in range(900)) + "}\nb: &b {<<: [*a, *a]}\nc: {<<: [*b]}",
        "a: &a [x, x]\n" + "\n".join(f"b{n}: [{', '.join(['*a'] * 60)}]" for n in range(3)),
    ],
)
def test_yaml_that_is_no_plain_data(tmp_path: Path, text: str) -> None:
    mark = tmp_path / "mark"
    file = tmp_path / "spec.yaml"
    file.write_text(text.replace("MARK", str(mark)))
    with pytest.raises(SpecError, match=r"is not YAML|there is twice|aliases|a merge key"):
        load_documents(file)
    assert not mark.exists()


def test_merge_keys_do_as_yaml_says(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: {<<: [*a, *b], z: 5}\nd: {<<: *b, y: 6}\n")
    document = next(iter(yaml_documents.load_all(file.read_text())))
    assert document["c"] == {"x": 1, "y": 2, "z": 5}
    assert document["d"] == {"y": 6, "z": 4}


async def test_templates_and_expressions_are_text(
    client: httpx.AsyncClient, dataset: str, dataset_body: dict[str, Any]
) -> None:
    for text in ("{0.__class__}", "{firing_date.__class__}", "{{7*7}}", "${jndi:ldap://x}", "$(id)", "`id`", "%n"):
        window = {"start": text, "days": 1}
        body = job_body(dataset={"name": dataset, "window": window})
        assert (await client.post("/v1/jobs", json=body)).status_code == 422, text
        schedule = {"name": "daily", "cron": "0 3 * * *", "job": body}
        assert (await client.post("/v1/schedules", json=schedule)).status_code == 422, text
        label = job_body(labels={"team": text})
        assert (await client.post("/v1/jobs", json=label)).json()["labels"]["team"] == text
    for rule in ("__import__('os').system('id') >= 1", "rating >= 4; import os", "rating.__class__ >= 1"):
        answer = await client.post("/v1/datasets", json={**dataset_body, "name": "odd", "label": {"rule": rule}})
        assert answer.status_code == 422, rule


async def test_a_pickle_is_not_opened(client: httpx.AsyncClient, settings: Settings, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    class Bomb:
        def __reduce__(self) -> Any:
            return open, (str(mark), "w")

    for name in ("rows.pkl", "rows.parquet", "rows.csv"):
        (settings.data_roots[0] / name).write_bytes(pickle.dumps(Bomb()))
        answer = await client.post("/v1/datasets/infer", json={"uri": str(settings.data_roots[0] / name)})
        assert answer.status_code == 422, answer.text
    assert not mark.exists()


@pytest.mark.parametrize(
    "uri",
    [
        "http://169.254.169.254/latest", "https://example.com/a.parquet", "ftp://h/a", "gs://b/a", "hdfs://h/a",
        "s3://key:secret@bucket/a.parquet", "s3://bucket/a?endpoint_override=http://127.0.0.1:1", "jar:file:///a",
        "file://elsewhere/a.parquet", "file://user:pw@localhost/a.parquet", "file:///data/a.parquet?x=1", "data:,1",
        "redis://127.0.0.1/0", "\\\\host\\share\\a.parquet", "/dev/stdin", "/proc/self/environ",
    ],
)  # fmt: skip
async def test_other_places_than_files_under_the_roots_are_refused(reading: httpx.AsyncClient, uri: str) -> None:
    answer = await reading.post("/v1/datasets/infer", json={"uri": uri})
    assert answer.status_code == 422, (uri, answer.text)
    assert "secret" not in answer.json()["detail"]


async def test_links_in_folders_and_joins_do_not_lead_out(
    client: httpx.AsyncClient, settings: Settings, dataset_body: dict[str, Any], tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    table = pa.table({"user": [1], "item": [1], "rating": [5], "date": ["2026-01-01"]})
    pq.write_table(table, outside / "secret.parquet")
    root = settings.data_roots[0]
    folder = root / "days"
    (folder / "date=2026-01-01").mkdir(parents=True)
    pq.write_table(table, folder / "date=2026-01-01" / "rows.parquet")
    own = {**dataset_body, "name": "days", "uri": str(folder)}
    (folder / "date=2026-01-01" / "more.parquet").symlink_to(outside / "secret.parquet")
    answer = await client.post("/v1/datasets", json=own)
    assert (answer.status_code, "leads outside" in answer.text) == (422, True)
    (folder / "date=2026-01-01" / "more.parquet").unlink()
    # A linked folder is not walked into: its rows are not the dataset's.
    (folder / "date=2026-01-02").symlink_to(outside, target_is_directory=True)
    found = await client.post("/v1/datasets", json=own)
    assert found.status_code == 201, found.text
    assert (await client.get("/v1/datasets/days/profile")).json()["rows"] == 1
    (root / "attributes.parquet").symlink_to(outside / "secret.parquet")
    join = {"uri": "attributes.parquet", "on": "item", "column": "rating"}
    features = {**dataset_body["features"], "attribute": {"type": "id", "join": join}}
    answer = await client.post("/v1/datasets", json={**dataset_body, "name": "joined", "features": features})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "features.attribute.join.uri"


LIMITS = ("MAX_ROWS", "MAX_COLUMNS", "MAX_ROW_GROUPS", "MAX_ROW_GROUP_BYTES")


@pytest.mark.parametrize("limit", LIMITS)
async def test_a_file_beyond_the_limits_is_refused_before_it_is_read(
    client: httpx.AsyncClient, data_file: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(parquet_limits, limit, 0)
    answer = await client.post("/v1/datasets/infer", json={"uri": str(data_file)})
    assert (answer.status_code, "at most 0 are read" in answer.text) == (422, True)


async def test_a_deep_schema_and_a_giant_footer_are_refused(client: httpx.AsyncClient, settings: Settings) -> None:
    values: Any = pa.array([1])
    for _ in range(parquet_limits.MAX_DEPTH):
        values = pa.StructArray.from_arrays([values], ["a"])
    deep = settings.data_roots[0] / "deep.parquet"
    pq.write_table(pa.table({"a": values}), deep)
    answer = await client.post("/v1/datasets/infer", json={"uri": str(deep)})
    assert (answer.status_code, "levels" in answer.text) == (422, True)
    giant = settings.data_roots[0] / "giant.parquet"
    giant.write_bytes(b"PAR1" + b"\x00" * 100 + (2**32 - 1).to_bytes(4, "little") + b"PAR1")
    answer = await client.post("/v1/datasets/infer", json={"uri": str(giant)})
    assert (answer.status_code, "footer" in answer.text) == (422, True)


async def test_no_footer_fails_the_service(client: httpx.AsyncClient, settings: Settings) -> None:
    """Bytes of a footer changed, cut out and repeated, names that are no text, histograms of other lengths than the
    levels have (for which pyarrow ends the process that asks for the column's metadata): refused, or read."""
    file, rng = settings.data_roots[0] / "hostile.parquet", random.Random(3)
    names = {"user": [1, 2], "item": ["a", "b"], "click": [0, 1], "list": [[1], [2, 3]], "struct": [{"a": 1}] * 2}
    pq.write_table(pa.table(names), file, row_group_size=1)
    whole = file.read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    rows, footer = whole[: -8 - length], whole[-8 - length : -8]
    hostile = [footer.replace(b"user", b"us\xbbr"), footer.replace(b"element", b"elem\xbbnt")]
    # 0x29 begins a list of eight-byte numbers, such as a histogram: as 0x19 it is another field's.
    hostile += [footer[:at] + b"\x19" + footer[at + 1 :] for at in range(length) if footer[at] == 0x29]
    for _ in range(200):
        at, kind, some = rng.randrange(length), rng.randrange(3), rng.randrange(1, 40)
        changed = rng.randbytes(some), b"", 2 * footer[at : at + some]
        hostile.append(footer[:at] + changed[kind] + footer[at + some :])
    statuses = Counter[int]()
    for one in hostile:
        file.write_bytes(rows + one + len(one).to_bytes(4, "little") + b"PAR1")
        answer = await client.post("/v1/datasets/infer", json={"uri": str(file)})
        statuses[answer.status_code] += 1
    assert set(statuses) == {200, 422}, statuses
