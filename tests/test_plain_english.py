"""The rules of plain English find what they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import plain_english

LONG = " ".join(["word"] * 31)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    for name in (*plain_english.PACKAGES, "docs"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("trainer/one.py", 'def f():\n    """Return what it is."""\n', "trainer/one.py:2: name the thing: Return what"),
        ("trainer/one.py", 'class A:\n    """Tell whether."""\n', "trainer/one.py:2: name the thing"),
        ("service/one.py", '"""How jobs are run."""\n', "service/one.py:1: name the thing: How jobs are run."),
        ("deploy/one.py", 'class A:\n    """\n    Where it is.\n    """\n', "deploy/one.py:2: name the thing: Where"),
        ("embeddings/one.py", 'async def f():\n    """Whether."""\n', "embeddings/one.py:2: name the thing: Whether"),
        ("service/one.py", 'MOST = 3\n"""Of a job."""\n', "service/one.py:2: say what it limits or holds: Of a job."),
        ("trainer/one.py", 'MOST = 3\n"""Those of a job."""\n', "trainer/one.py:2: say what it limits or holds: Those"),
        ("trainer/one.py", 'class A:\n    x = 0\n    """When."""\n', "trainer/one.py:3: say what it limits"),
        ("embeddings/holding.py", "", "embeddings/holding.py: another name for the module"),
        ("docs/one.md", f"# Title\n\n- {LONG}.\n", "docs/one.md: 31 words: word"),
    ],
)
def test_each_rule_finds_its_fault(
    tree: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, found: str
) -> None:
    (tree / name).write_text(text, "utf-8")
    assert plain_english.main() == 1
    assert found in capsys.readouterr().out


@pytest.mark.parametrize("word", plain_english.QUESTIONS.split("|"))
def test_neither_a_docstring_nor_the_text_of_a_constant_begins_with_a_question_word(
    tree: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    (tree / "service/one.py").write_text(f'"""{word} it is."""\n\nMOST = 3\n"""{word} it limits."""\n', "utf-8")
    assert plain_english.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        f"service/one.py:1: name the thing: {word} it is.",
        f"service/one.py:4: say what it limits or holds: {word} it limits.",
    ]


def test_plain_text_passes(tree: Path) -> None:
    (tree / "trainer/one.py").write_text(
        '"""Whichever."""\n\nMOST = 3\n"""Most of them."""\n\ndef f():\n    """Return a thing."""\n', "utf-8"
    )
    text = f"# {LONG}\n\n| {LONG} |\n\n```\n{LONG}\n```\n\n{LONG[:-5]}: {LONG[:-5]}; `{LONG}` = 1 + 2.\n"
    (tree / "docs/one.md").write_text(text, "utf-8")
    assert plain_english.main() == 0
