"""Datasets in object storage: under the roots that the operator names, nowhere else, whatever a uri looks like."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from service.core.errors import Problem
from service.core.settings import Settings
from service.datasets import paths, registry
from service.datasets.file_cache import SETTLED_SECONDS
from tests.contracts import store_servers
from tests.service.service_kit import client_of, job_body, running
from trainer.data.sources.locations import FILE_SYSTEMS
from trainer.spec import parse_dataset, uri_schemes

ROOTS = Settings(object_roots=("s3://rows/own/", "s3://whole"))


@pytest.mark.parametrize(
    "uri",
    [
        "s3://rows/other/a.parquet", "s3://rows/own2/a", "s3://rows", "s3://else/a", "s3://rows/own/../other/a",
        "s3://rows/./own/a", "s3://rows//own/a", "s3://key:secret@rows/own/a", "s3://rows/own/a?region=x", "s3://",
        "s3://rows/own/%2e%2e/a", "S3://rows/own/a",
    ],
)  # fmt: skip
def test_what_lies_elsewhere_is_refused_without_a_look(uri: str) -> None:
    """No credentials and no server are there: a look would fail otherwise."""
    with pytest.raises(Problem) as raised:
        paths.allowed_uri(ROOTS, uri, "uri")
    assert raised.value.status == 422
    assert "secret" not in str(raised.value)


def test_a_root_of_one_scheme_is_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uri_schemes, "OBJECT_PREFIXES", ("s3://", "gs://"))
    with pytest.raises(Problem, match="lies outside the data roots"):
        paths.allowed_uri(ROOTS, "gs://rows/own/a.parquet", "uri")


def test_stores_and_runs_are_no_data_though_a_root_holds_them() -> None:
    settings = Settings(
        object_roots=("s3://rows/", "s3://rows/runs/chosen"),
        tenant_object_roots=(("ads", "s3://rows"),),
        store_url="s3://rows/store?follow_seconds=1",
        run_storage="s3://rows/runs",
    )
    for of in (settings, settings.for_tenant("ads")):
        for uri in ("s3://rows/runs/job/rows.parquet", "s3://rows/runs", "s3://rows/store/namespaces/b/items.arrow"):
            with pytest.raises(Problem, match="keeps files of its own"):
                paths.allowed_uri(of, uri, "uri")


def test_roots_come_from_the_environment_and_are_of_one_tenant() -> None:
    found = Settings.from_environment(
        {"EVENKEEL_DATA_ROOTS": "s3://rows/own:/data:s3://whole", "EVENKEEL_TENANT_DATA_ROOTS": "a=s3://rows/a:b=/b"}
    )
    assert found.object_roots == ("s3://rows/own", "s3://whole")
    assert found.data_roots == (Path("/data"),)
    assert found.for_tenant("a").object_roots == ("s3://rows/a",)
    assert found.for_tenant("a").data_roots == ()
    assert found.for_tenant("b").object_roots == ()
    assert Settings.from_environment({}).object_roots == ()


@pytest.mark.process
def test_a_dataset_below_a_root_is_taken_with_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"user": [1, 2], "item": [1, 2], "click": [0, 1]}), tmp_path / "rows.parquet")
    pq.write_table(pa.table({"item": [1, 2], "brand": [3, 4]}), tmp_path / "brands.parquet")
    for name, value in store_servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    brand = {"type": "id", "join": {"uri": "brands.parquet", "on": "item", "column": "brand"}}
    described = {
        "name": "d", "uri": "s3://rows/own/rows.parquet", "label": {"column": "click"},
        "features": {"user": {"type": "id"}, "item": {"type": "id"}, "brand": brand},
    }  # fmt: skip
    with store_servers.s3_server("rows") as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        files = pafs.S3FileSystem(endpoint_override=address, scheme="http")
        pafs.copy_files(str(tmp_path), "rows/own", destination_filesystem=files)
        found = registry.check_files(ROOTS, parse_dataset(described))
        assert found.features["brand"].join is not None
        assert found.features["brand"].join.uri == "s3://rows/own/brands.parquet"
        # Objects that are as they were, and old enough to stay so, are listed and not opened.
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + int(2 * SETTLED_SECONDS * 1e9))
        registry.check_files(ROOTS, parse_dataset(described))
        only_listed = SimpleNamespace(get_file_info=files.get_file_info)
        with monkeypatch.context() as context:
            context.setitem(FILE_SYSTEMS, "s3", lambda: only_listed)
            registry.check_files(ROOTS, parse_dataset(described))
        pq.write_table(pa.table({"item": [1, 2], "make": [3, 4]}), "rows/own/brands.parquet", filesystem=files)
        with pytest.raises(Problem, match="no column 'brand'"):
            registry.check_files(ROOTS, parse_dataset(described))
        described["label"] = {"column": "clicked"}
        with pytest.raises(Problem, match="no column 'clicked'"):
            registry.check_files(ROOTS, parse_dataset(described))
        described["uri"] = "s3://rows/own/nothing.parquet"
        with pytest.raises(Problem, match="no such file"):
            registry.check_files(ROOTS, parse_dataset(described))


@pytest.mark.anyio
async def test_a_storage_that_takes_connections_and_does_not_answer_keeps_nobody_else_waiting(
    settings: Settings, dataset_body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "OBJECTS_SECONDS", 1.0)
    for name, value in store_servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    settings = dataclasses.replace(settings, object_roots=("s3://rows",))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with running(settings) as app:
            async with client_of(app, settings.admin_key_file.read_text().strip()) as client:
                far = {**dataset_body, "name": "far", "uri": "s3://rows/a.parquet"}
                waiting = [asyncio.create_task(client.post("/v1/datasets", json=far)) for _ in range(20)]
                (await asyncio.to_thread(silent.accept))[0].close()
                near = asyncio.wait_for(client.post("/v1/datasets", json=dataset_body), 60)
                assert (await near).status_code == 201
                assert (await client.post("/v1/jobs", json=job_body())).status_code == 202
                for answer in await asyncio.gather(*waiting):
                    assert (answer.status_code, answer.json()["type"]) == (503, "urn:evenkeel:data-unavailable")
                    assert "did not answer within 1 s" in answer.json()["detail"]
                    assert answer.headers["retry-after"] == "10"
