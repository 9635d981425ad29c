"""Which backend opens a URL, also one of another package."""

from __future__ import annotations

from pathlib import Path

import pytest

from embeddings.store import open_store
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
