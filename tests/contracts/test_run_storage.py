"""One suite over every run storage: whole files, one conditional put, folders that appear with their record."""

from __future__ import annotations

import contextlib
import os
import resource
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from embeddings.object_storage import PART_BYTES, ObjectStorage
from tests.contracts.faulty_server import GOOGLE_TOKEN, Faults, faulty_server
from tests.support.outside_package import install
from trainer.storage.base import MissingFileError, RunStorage, StorageError, StoredFile, content_of
from trainer.storage.cache import HostCache
from trainer.storage.destinations import fetch, written
from trainer.storage.destinations import put as put_results
from trainer.storage.folders import Folders, StoredFolder, new_token
from trainer.storage.storage_registry import open_storage

pytestmark = pytest.mark.process  # the object store is one


SERVERS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL"}


@pytest.fixture(params=["directory", "s3", "gs"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunStorage]:
    if request.param == "directory":
        yield open_storage((tmp_path / "shared place").as_uri())
        return
    address = request.getfixturevalue("s3_address")
    with contextlib.ExitStack() as opened:
        if request.param == "gs":
            address = opened.enter_context(faulty_server(address, as_google=True)).address
            monkeypatch.setenv("GOOGLE_BEARER_TOKEN", GOOGLE_TOKEN)
        monkeypatch.setenv(SERVERS[request.param], f"http://{address}")
        yield open_storage(f"{request.param}://vectors/runs/{uuid.uuid4().hex}")


@pytest.fixture(params=["s3", "gs"])
def faults(
    request: pytest.FixtureRequest, s3_address: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Faults, RunStorage]]:
    with faulty_server(s3_address, as_google=request.param == "gs") as server:
        monkeypatch.setenv(SERVERS[request.param], f"http://{server.address}")
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", GOOGLE_TOKEN)
        yield server, ObjectStorage(f"{request.param}://vectors/faults/{uuid.uuid4().hex}", retries=1)


def written_bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_file_is_put_replaced_listed_fetched_and_deleted(storage: RunStorage, tmp_path: Path) -> None:
    assert storage.list("") == []
    storage.put_file("a/one", written_bytes(tmp_path / "first", b"first"))
    storage.put_file("a/one", written_bytes(tmp_path / "second", b"the second"))
    storage.put_file("a/b/two", written_bytes(tmp_path / "two", b""))
    storage.put_file("ab", written_bytes(tmp_path / "beside", b"beside"))
    assert storage.read("a/one") == b"the second"
    assert storage.list("a/") == [StoredFile("a/b/two", 0), StoredFile("a/one", 10)]
    assert [one.name for one in storage.list("")] == ["a/b/two", "a/one", "ab"]
    storage.fetch("a/one", tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == b"the second"
    storage.delete(["a/one", "a/none", "a/b/two"])
    assert storage.list("") == [StoredFile("ab", 6)]
    storage.delete([])


def test_a_file_of_several_parts_comes_back(storage: RunStorage, tmp_path: Path) -> None:
    content = os.urandom(PART_BYTES + 4321)
    storage.put_file("large", written_bytes(tmp_path / "large", content))
    storage.fetch("large", tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == content


def test_a_name_that_is_put_is_not_put_again(storage: RunStorage) -> None:
    assert storage.put_if_absent("name", b"first")
    assert not storage.put_if_absent("name", b"second")
    assert storage.read("name") == b"first"


def test_of_several_that_put_at_once_one_is_first(tmp_path: Path) -> None:
    # S3 promises the same of If-None-Match; the server of these tests looks and writes in two steps.
    storage = open_storage((tmp_path / "shared place").as_uri())
    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda n: storage.put_if_absent("name", b"%d" % n), range(8)))
    assert sum(first) == 1
    assert storage.read("name") == b"%d" % first.index(True)
    assert storage.put_if_absent("name", b"%d" % first.index(True)), "the same again is there"


def test_a_file_that_is_not_there_is_named(storage: RunStorage, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no/such"):
        storage.read("no/such")
    with pytest.raises(MissingFileError, match="no/such"):
        storage.fetch("no/such", tmp_path / "to")
    with pytest.raises(FileNotFoundError, match="not here"):
        storage.put_file("a", tmp_path / "not here")


@pytest.mark.parametrize(
    "uri", ["/runs", "ftp://host/runs", "s3:///runs", "gs:///runs", "file://host/runs", "s3://key@bucket/runs"]
)
def test_what_is_no_storage_is_refused_with_the_remedy(uri: str) -> None:
    with pytest.raises(ValueError, match="write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///DIRECTORY"):
        open_storage(uri)


def test_a_storage_of_another_package_is_opened_and_named_in_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from pathlib import Path\nfrom trainer.storage.shared_directory import SharedDirectory\n"
    code += "def open_mine(uri):\n    return SharedDirectory(Path(uri.removeprefix('mine://')))\n"
    install(tmp_path, "my_storage", code, {"evenkeel.run_storages": {"mine": "my_storage:open_mine"}})
    monkeypatch.syspath_prepend(tmp_path)
    assert open_storage(f"mine://{tmp_path}/runs").put_if_absent("name", b"first")
    assert (tmp_path / "runs" / "name").read_bytes() == b"first"
    with pytest.raises(ValueError, match=r"file:///DIRECTORY or mine://\.\.\., and keys"):
        open_storage("other://place")


def test_results_are_put_whole_under_their_own_names_and_nothing_over_them(storage: RunStorage, tmp_path: Path) -> None:
    with written(f"{storage.uri}/scores.parquet") as path:
        path.write_bytes(b"scores")
    assert storage.read("scores.parquet") == b"scores"
    with pytest.raises(FileExistsError, match=r"scores\.parquet is there already: remove it"):
        with written(f"{storage.uri}/scores.parquet"):
            raise AssertionError("not reached")

    model = f"{storage.uri}/models/one"
    for _ in range(2):  # the second writing finds what the first one tore
        with pytest.raises(RuntimeError, match="no room"), written(model, "manifest"):
            raise RuntimeError("no room")
        storage.put_file("models/one/a", written_bytes(tmp_path / "torn", b"torn"))
    with written(model, "manifest") as path:
        (path / "inside").mkdir(parents=True)
        (path / "a").write_bytes(b"a")
        (path / "inside" / "b").write_bytes(b"b")
        (path / "manifest").write_bytes(b"whole")
    fetch(model, tmp_path / "here")
    found = {one.relative_to(tmp_path / "here").as_posix(): one.read_bytes() for one in (tmp_path / "here").rglob("?*")
             if one.is_file()}  # fmt: skip
    assert found == {"a": b"a", "inside/b": b"b", "manifest": b"whole"}
    with pytest.raises(FileExistsError), written(model, "manifest"):
        raise AssertionError("not reached")
    (tmp_path / "other").mkdir()
    written_bytes(tmp_path / "other" / "manifest", b"another")
    with pytest.raises(StorageError, match="another process has put it"):
        put_results(storage, "models/one", tmp_path / "other", "manifest")
    fetch(f"{storage.uri}/models/none", tmp_path / "none")
    assert list((tmp_path / "none").iterdir()) == []


def test_a_place_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="names no file or folder in a storage"), written("s3://bucket"):
        raise AssertionError("not reached")


def test_who_has_no_token_reads_what_to_do(storage: RunStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    if storage.uri.startswith("gs://"):
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "another")
        with pytest.raises(StorageError, match="keys in the environment may use the bucket"):
            open_storage(storage.uri).put_if_absent("name", b"first")


# --- folders ---------------------------------------------------------------------------------------------------------


def put(folders: Folders, name: str, folder: Path, **files: bytes) -> StoredFolder:
    """Everything but the record."""
    token, found = new_token(), {}
    for path, content in files.items():
        source = written_bytes(folder / f"{token}-{path}", content)
        folders.put(token, path, source)
        found[path] = content_of(source)
    return StoredFolder(name, token, found)


def test_a_folder_is_there_with_its_record_and_torn_ones_are_swept(storage: RunStorage, tmp_path: Path) -> None:
    folders, cache = Folders(storage, "run/checkpoints"), HostCache(tmp_path / "cache")
    whole, torn = put(folders, "one", tmp_path, a=b"aaa", b=b"b"), put(folders, "two", tmp_path, a=b"torn")
    assert folders.names() == []
    assert folders.commit(whole)
    assert folders.names() == ["one"]
    with pytest.raises(MissingFileError):
        folders.read("two")
    folders.sweep()
    assert not any(torn.token in one.name for one in storage.list(""))
    found = folders.read("one")
    assert found == whole
    folders.fetch(found, "a", tmp_path / "fetched", cache)
    assert (tmp_path / "fetched").read_bytes() == b"aaa"
    folders.remove("one")
    folders.remove("one")
    assert storage.list("") == []


def test_a_name_is_given_once_and_each_writer_has_its_own_files(storage: RunStorage, tmp_path: Path) -> None:
    folders = Folders(storage, "run/checkpoints")
    first, second = put(folders, "one", tmp_path, a=b"first"), put(folders, "one", tmp_path, a=b"other")
    assert folders.commit(first)
    assert not folders.commit(second)
    assert folders.read("one").files == first.files


def test_a_folder_whose_files_were_swept_is_no_folder(storage: RunStorage, tmp_path: Path) -> None:
    """A writer that is stopped before its record and wakes after another one's sweep."""
    folders = Folders(storage, "run/checkpoints")
    slow = put(folders, "one", tmp_path, a=b"aaa")
    folders.sweep()
    with pytest.raises(StorageError, match=r"/a is not there, 3 bytes were put"):
        folders.commit(slow)
    assert folders.names() == []


@pytest.mark.parametrize(
    "record", [b"{", b"[]", b'{"token": "../..", "files": {}}', b'{"token": "%032d", "files": {"../x": [1, "a"]}}' % 0]
)
def test_a_damaged_record_is_no_folder(storage: RunStorage, tmp_path: Path, record: bytes) -> None:
    folders = Folders(storage, "p")
    storage.put_if_absent("p/one.json", record)
    with pytest.raises(StorageError, match=r"p/one\.json was changed after it was put there"):
        folders.read("one")
    folders.sweep()
    folders.remove("one")
    assert folders.names() == []


# --- faults ----------------------------------------------------------------------------------------------------------


def test_one_error_of_the_server_is_tried_again(faults: tuple[Faults, RunStorage], tmp_path: Path) -> None:
    server, storage = faults
    server.errors = 1
    storage.put_file("a", written_bytes(tmp_path / "a", b"aaa"))
    server.errors = 1
    assert storage.read("a") == b"aaa"


def test_a_server_that_only_fails_is_named_with_the_remedy(faults: tuple[Faults, RunStorage], tmp_path: Path) -> None:
    server, storage = faults
    server.every = "/vectors"
    for act in (
        lambda: storage.put_file("a", written_bytes(tmp_path / "a", b"aaa")),
        lambda: storage.put_if_absent("a", b"aaa"),
        lambda: storage.read("a"),
        lambda: storage.fetch("a", tmp_path / "to"),
        lambda: storage.list(""),
        lambda: storage.delete(["a"]),
    ):
        with pytest.raises(StorageError, match="see that the object store is up"):
            act()


def test_an_answer_that_is_lost_does_not_lose_the_name(faults: tuple[Faults, RunStorage]) -> None:
    server, storage = faults
    server.lost = 1
    assert storage.put_if_absent("a", b"mine")
    assert len([line for line in server.seen if line.startswith("PUT")]) == 2, "it was sent again, and refused"
    assert not storage.put_if_absent("a", b"of another")


def test_a_multipart_upload_that_is_torn_leaves_no_file(faults: tuple[Faults, RunStorage], tmp_path: Path) -> None:
    server, storage = faults
    server.every = "partNumber=2"
    with pytest.raises(StorageError):
        storage.put_file("large", written_bytes(tmp_path / "large", bytes(2 * PART_BYTES)))
    assert storage.list("") == []
    with pytest.raises(MissingFileError):
        storage.read("large")


def test_a_fetch_that_is_cut_is_never_taken_for_the_file(faults: tuple[Faults, RunStorage], tmp_path: Path) -> None:
    server, storage = faults
    content = os.urandom(1 << 20)
    source = written_bytes(tmp_path / "a", content)
    storage.put_file("a", source)
    cache = HostCache(tmp_path / "cache")
    server.cut = 9
    with pytest.raises(StorageError):
        cache.link(storage, "a", content_of(source), tmp_path / "to")
    assert not (tmp_path / "to").exists()
    server.cut = 0
    cache.link(storage, "a", content_of(source), tmp_path / "to")
    assert (tmp_path / "to").read_bytes() == content


@contextlib.contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """A disk on which no file can become longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_half_fetched(storage: RunStorage, tmp_path: Path) -> None:
    source = written_bytes(tmp_path / "a", os.urandom(1 << 20))
    storage.put_file("a", source)
    cache = HostCache(tmp_path / "cache")
    with full_disk(1 << 19), pytest.raises((StorageError, OSError)):
        storage.fetch("a", tmp_path / "to")
    if storage.path("a") is None:
        with full_disk(1 << 19), pytest.raises((StorageError, OSError)):
            cache.link(storage, "a", content_of(source), tmp_path / "linked")
        assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != "lock"] == []


def test_a_full_directory_keeps_what_it_has(tmp_path: Path) -> None:
    storage = open_storage(tmp_path.as_uri())
    storage.put_if_absent("a", b"a")
    with full_disk(1 << 9), pytest.raises(StorageError, match="check that the directory is mounted and has space"):
        storage.put_if_absent("b", bytes(1 << 10))
    assert storage.list("") == [StoredFile("a", 1)]
