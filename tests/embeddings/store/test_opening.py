"""Which backend opens a URL, also one of another package."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from embeddings.store import open_store
from embeddings.store.backends.redis import connect
from embeddings.store.url import namespaced, parse_store_url, with_quoted_password
from service.core.settings import Settings
from tests.support.outside_package import install


def test_a_path_and_a_file_url_are_the_same_store(tmp_path: Path) -> None:
    assert open_store(tmp_path / "s").root == open_store(f"file://{tmp_path}/s").root == tmp_path / "s"


@pytest.mark.parametrize("url", ["gopher://host/s", "http://host/s", "://s"])
def test_a_scheme_without_a_backend_is_refused_with_those_that_there_are(url: str) -> None:
    with pytest.raises(ValueError, match=r"use a path, file:///PATH, redis://HOST:PORT/DB or s3://BUCKET/PREFIX"):
        open_store(url)


def test_a_file_url_of_another_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="names a path of this machine"):
        open_store("file://elsewhere/s")


@pytest.mark.parametrize("password", ["v8N/nt/lH0=", "a?b=c", "x#y", "p@ss/w@rd", "12/3", "plain", "per%2Fcent"])
def test_a_password_of_redis_may_be_as_it_is_and_is_never_shown(password: str) -> None:
    url = parse_store_url(f"redis://:{password}@db.example:6379/2?prefix=a@b:", 0.0, ("prefix",))
    assert (url.url, url.options) == ("redis://db.example:6379/2", {"prefix": "a@b:"})
    client = connect(url.address)
    options = client.connection_pool.connection_kwargs
    expected = (unquote(password), "db.example", 6379, 2)
    assert (options["password"], options["host"], options["port"], options["db"]) == expected
    with pytest.raises(ValueError, match="no option prefx") as caught:
        open_store(f"redis://:{password}@db.example:6379/2?prefx=a")
    assert password not in str(caught.value)
    within = parse_store_url(namespaced(f"redis://:{password}@db.example:6379/2", "ads"), 0.0, ("prefix",))
    assert (within.url, within.options) == ("redis://db.example:6379/2", {"prefix": "evenkeel:@ads:"})
    assert Settings(home=Path("h"), store_url=f"redis://:{password}@db:6379/0").store_url.endswith("@db:6379/0")


@pytest.mark.parametrize("url", ["redis://h:6379/0?prefix=a@b", "s3://bucket/a@b/c", "/a@b", "redis://u:p%2F@h/0"])
def test_other_urls_are_as_they_are(url: str) -> None:
    assert with_quoted_password(url) == url


def test_another_package_enters_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from pathlib import Path\nfrom embeddings.store import Store\n"
    code += "def open_mine(url):\n    return Store(Path(url.removeprefix('mine://')))\n"
    install(tmp_path, "my_store", code, {"evenkeel.stores": {"mine": "my_store:open_mine"}})
    monkeypatch.syspath_prepend(tmp_path)
    assert open_store("mine:///somewhere").root == Path("/somewhere")


def test_a_scheme_whose_package_cannot_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "cut_store", "import no_such_module\n", {"evenkeel.stores": {"cut": "cut_store:open_cut"}})
    monkeypatch.syspath_prepend(tmp_path)
    assert open_store(tmp_path / "s").root == tmp_path / "s"
    with pytest.raises(ValueError, match="'cut' of package cut_store cannot be imported"):
        open_store("cut://host/s")
