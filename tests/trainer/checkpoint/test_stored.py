"""Checkpoints in a run storage: whole or not there at all, whatever happens to who puts them, and read in any plan."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from embeddings.object_storage import ObjectStorage
from tests.contracts import store_servers
from tests.trainer.checkpoint.test_format import DENSE, assert_rows_equal, make_table, save_simple
from tests.trainer.checkpoint.test_reshard import KINDS, STEP, TABLES, canonical, make, save_source
from trainer.checkpoint.format import Checkpoint, CheckpointError, latest_valid
from trainer.checkpoint.remote_checkpoints import VIEW_FILE, described, make_view, show
from trainer.runs.failures import LeaseLostError
from trainer.storage.base import StorageError
from trainer.storage.folders import Folders
from trainer.storage.shared_directory import SharedDirectory
from trainer.storage.storage_registry import open_storage


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def s3_address() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in store_servers.CREDENTIALS.items():
            environment.setenv(name, value)
        with store_servers.s3_server("runs") as address:
            environment.setenv("AWS_ENDPOINT_URL", f"http://{address}")
            yield address


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.process)])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> Folders:
    if request.param == "s3":
        request.getfixturevalue("s3_address")
    uri = {"directory": (tmp_path / "there").as_uri(), "s3": f"s3://runs/{uuid.uuid4().hex}"}[request.param]
    return Folders(open_storage(uri), "checkpoints")


@pytest.fixture
def on_disk(tmp_path: Path) -> Folders:
    return Folders(open_storage((tmp_path / "there").as_uri()), "checkpoints")


def seen(folders: Folders, directory: Path) -> Checkpoint | None:
    """What another host, with a directory and a cache of its own, finds there."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("EVENKEEL_CACHE", f"{directory}-cache")
        show(folders, directory)
        return latest_valid(directory)


def test_what_one_host_saves_another_reads(folders: Folders, tmp_path: Path) -> None:
    attached = tmp_path / "ids.arrow"
    attached.write_bytes(b"ids")
    table = make_table("item", 10, 4, 1)
    save_simple(tmp_path / "here", folders=folders, tables=[table], attached={"ids.arrow": attached})
    assert list((tmp_path / "here").iterdir()) == [], "a host keeps nothing but its cache"
    found = seen(folders, tmp_path / "elsewhere")
    assert found is not None
    assert (found.step, found.extra) == (500, {"step": 500})
    assert_rows_equal(found.read_rows("item"), table)
    assert_rows_equal(found.read_rows("item", 3, 4), table, 3, 7)
    assert all(torch.equal(value, DENSE[name]) for name, value in found.read_dense().items())
    assert found.attached("ids.arrow").read_bytes() == b"ids"


def test_only_the_last_are_kept_and_an_abandoned_future_goes(folders: Folders, tmp_path: Path) -> None:
    here = tmp_path / "here"
    for step in (100, 200, 300, 400):
        save_simple(here, step, folders=folders, keep_last=2)
    assert sorted(folders.names()) == ["step-000000000300", "step-000000000400"]
    show(folders, here)
    save_simple(here, 300, folders=folders, keep_last=2)
    assert sorted(folders.names()) == ["step-000000000300", "step-000000000300.1"]
    assert len(folders.storage.list("")) == 2 * (3 + 1), "of what was replaced nothing is left"
    assert seen(folders, here).path.name == "step-000000000300.1"
    assert sorted(path.name for path in here.iterdir()) == ["step-000000000300", "step-000000000300.1"]


def test_a_checkpoint_that_is_not_whole_is_passed_over(folders: Folders, tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        save_simple(tmp_path / "here", step, folders=folders, keep_last=4)

    def file_of(step: int, start: str) -> str:
        token = folders.read(f"step-{step:012d}").token
        return next(one.name for one in folders.storage.list(f"checkpoints/files/{token}/") if f"/{start}" in one.name)

    folders.storage.delete([file_of(400, "table-")])
    for step, start in ((300, "dense"), (200, "manifest")):
        other, name = tmp_path / start, file_of(step, start)
        other.write_bytes(os.urandom(len(folders.storage.read(name))))
        folders.storage.put_file(name, other)
    with pytest.warns(RuntimeWarning, match="passed over") as warned:
        found = seen(folders, tmp_path / "elsewhere")
    assert found is not None
    assert found.step == 100
    words = " ".join(str(one.message) for one in warned)
    assert "is not there" in words
    assert "dense.safetensors does not hold the" in words
    assert "manifest.json does not hold the" in words


def test_a_storage_that_is_away_is_not_an_empty_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3_address: str
) -> None:
    """Else a run would begin anew beside its checkpoints."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    away = Folders(ObjectStorage("s3://runs/away", retries=0), "checkpoints")
    with pytest.raises(StorageError, match="see that the object store is up"):
        show(away, tmp_path / "here")
    with pytest.raises(CheckpointError, match="see that the object store is up"):
        save_simple(tmp_path / "here", folders=away)


class Deadly(SharedDirectory):
    """Kills its process when it puts a file whose name contains ``at``."""

    at = ""

    def put_file(self, name: str, source: Path) -> None:
        if self.at in name:
            os.kill(os.getpid(), 9)
        super().put_file(name, source)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if self.at in name:
            os.kill(os.getpid(), 9)
        return super().put_if_absent(name, data)


@pytest.mark.process
@pytest.mark.parametrize("at", ["table-", "dense", "manifest", "step-000000000200.json"])
def test_a_writer_that_is_killed_leaves_the_earlier_checkpoint(on_disk: Folders, tmp_path: Path, at: str) -> None:
    save_simple(tmp_path / "here", 100, folders=on_disk)
    deadly = Deadly(on_disk.storage.root)
    deadly.at = at
    process = multiprocessing.get_context("fork").Process(
        target=save_simple, args=(tmp_path / "here", 200), kwargs={"folders": Folders(deadly, "checkpoints")}
    )
    process.start()
    process.join()
    assert process.exitcode == -9
    assert seen(on_disk, tmp_path / "elsewhere").step == 100
    assert list((tmp_path / "here").iterdir()) != []
    save_simple(tmp_path / "here", 150, folders=on_disk)
    assert list((tmp_path / "here").iterdir()) == []
    assert len(on_disk.storage.list("")) == 2 * (3 + 1), "the torn upload was swept"
    assert seen(on_disk, tmp_path / "elsewhere").step == 150


def test_an_attempt_without_its_lease_puts_no_record(on_disk: Folders, tmp_path: Path) -> None:
    calls = []

    def fence() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise LeaseLostError("given up")

    with pytest.raises(CheckpointError, match="given up"):
        save_simple(tmp_path / "here", folders=on_disk, fence=fence)
    assert on_disk.names() == []
    assert list((tmp_path / "here").iterdir()) == []


def test_of_two_attempts_that_take_one_name_the_second_fails(on_disk: Folders, tmp_path: Path) -> None:
    calls = []

    def other_is_faster() -> None:
        calls.append(None)
        if len(calls) == 2:
            save_simple(tmp_path / "other", folders=on_disk, extra={"whose": "the other's"})

    with pytest.raises(CheckpointError, match=r"files/.* is not there|was written by another attempt"):
        save_simple(tmp_path / "here", folders=on_disk, fence=other_is_faster)
    assert seen(on_disk, tmp_path / "elsewhere").extra == {"whose": "the other's"}


def test_a_view_is_made_anew_where_its_checkpoint_was_replaced(on_disk: Folders, tmp_path: Path) -> None:
    save_simple(tmp_path / "here", folders=on_disk, extra={"n": 1})
    assert seen(on_disk, tmp_path / "elsewhere").extra == {"n": 1}
    on_disk.remove("step-000000000500")
    save_simple(tmp_path / "here", folders=on_disk, extra={"n": 2})
    found = seen(on_disk, tmp_path / "elsewhere")
    assert found.extra == {"n": 2}
    shutil.rmtree(tmp_path / "third", ignore_errors=True)
    make_view(described(found.path), tmp_path / "third")
    assert (tmp_path / "third" / VIEW_FILE).exists()
    assert Checkpoint(tmp_path / "third").extra == {"n": 2}


# --- plans -----------------------------------------------------------------------------------------------------------


def save_on_hosts(source: str, folder: str, uri: str, kind: str) -> None:
    """Takes over the checkpoint at ``source`` and saves it in a plan; each rank on a host of its own."""
    import torch.distributed as dist

    rank = dist.get_rank()
    os.environ["EVENKEEL_CACHE"] = f"{folder}/cache-{kind}-{rank}"
    sharded = make(kind)
    sharded.load_from(Checkpoint(source))
    sharded.save(f"{folder}/host-{rank}/{kind}", folders=Folders(open_storage(uri), kind))


def load_on_hosts(folder: str, uri: str, kind: str) -> tuple[list[tuple[str, str]], list[str]]:
    """What a plan makes of every checkpoint: what is not as it should be, and the files that this host fetched."""
    import torch.distributed as dist

    world_size, rank = dist.get_world_size(), dist.get_rank()
    os.environ["EVENKEEL_CACHE"] = f"{folder}/cache-{kind}-{world_size}-{rank}-of"
    expected = {table.name: canonical(table) for table in TABLES}
    sharded, wrong, fetched = make(kind), [], []
    for saved in KINDS:
        here = Path(folder, f"host-{world_size}-{rank}", kind, saved)
        show(Folders(open_storage(uri), saved), here)
        for piece in sharded._sharded.local_pieces():
            piece.tables.reset()
        (path,) = here.iterdir()
        sharded.load_from(Checkpoint(path), verify=False)
        fetched += [f"{saved}/{file.name}" for file in path.glob("table-*")]
        for piece in sharded._sharded.local_pieces():
            rows = slice(piece.row_start, piece.row_start + piece.row_count)
            columns = slice(piece.column_start, piece.column_start + piece.column_count)
            whole = expected[piece.name]
            for name, value in (("weight", whole.weight), *whole.state.items()):
                part = value[rows] if value.dim() == 1 else value[rows, columns]
                held = {"weight": piece.tables.weight(piece.name), **piece.tables.state(piece.name)}[name]
                if not torch.equal(held, part):
                    wrong.append((saved, piece.name))
    return wrong, fetched


@pytest.mark.xdist_group("ranks")
def test_hosts_that_share_no_directory_load_any_plan_of_any_other(ranks, tmp_path: Path) -> None:
    source, uri = save_source(tmp_path), (tmp_path / "there").as_uri()
    for kind in KINDS:
        ranks(2).run(save_on_hosts, str(source), str(tmp_path), uri, kind)
    for world_size in (1, 2):
        for kind in ("row_wise", "column_wise"):
            results = ranks(world_size).run(load_on_hosts, str(tmp_path), uri, kind)
            assert [wrong for wrong, _ in results] == [[]] * world_size
            if (world_size, kind) == (2, "row_wise"):
                by_rank = [[name for name in fetched if name.startswith("row_wise/")] for _, fetched in results]
                assert all(0 < len(names) < len(folder_files(uri)) for names in by_rank), "a rank fetches its own rows"


def folder_files(uri: str) -> list[str]:
    found = Folders(open_storage(uri), "row_wise")
    return [name for name in found.read(f"step-{STEP:012d}").files if name.startswith("table-")]
