"""Registries that other packages enter kinds in, and what a package that cannot be imported does to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from embeddings.outside_packages import OutsidePackageError, Registry, load_all
from tests.support.outside_package import install

CUT = ("'cut' of package cut cannot be imported", "entry point cut:Cut of evenkeel.things", "no_such_module")


@pytest.fixture
def things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[object]:
    install(
        tmp_path, "whole", "class Whole: pass\n", {"evenkeel.things": {"whole": "whole:Whole", "own": "whole:Whole"}}
    )
    install(tmp_path, "cut", "import no_such_module\n", {"evenkeel.things": {"cut": "cut:Cut"}})
    install(tmp_path, "old", "class New: pass\n", {"evenkeel.things": {"old": "old:Old"}})
    monkeypatch.syspath_prepend(tmp_path)
    return Registry("evenkeel.things", {"own": int})


def test_its_own_kinds_come_first_then_those_of_other_packages(things: Registry[type]) -> None:
    assert things["own"] is int
    assert things["whole"].__name__ == "Whole"
    assert list(things) == ["own"]
    with pytest.raises(KeyError, match="nothing"):
        things["nothing"]


def test_who_asks_for_a_kind_that_cannot_be_imported_reads_why_and_the_remedy(things: Registry[type]) -> None:
    with pytest.raises(OutsidePackageError) as caught:
        things["cut"]
    assert all(text in str(caught.value) for text in (*CUT, "pip uninstall cut"))
    with pytest.raises(OutsidePackageError, match=r"old:Old of evenkeel.things\): AttributeError"):
        things["old"]


def test_one_that_cannot_be_imported_does_not_keep_the_others_out(things: Registry[type]) -> None:
    loaded, broken = load_all("evenkeel.things")
    assert loaded.keys() == {"whole", "own"}
    assert broken.keys() == {"cut", "old"}
    assert all(text in broken["cut"] for text in CUT)
