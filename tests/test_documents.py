"""README, guides and pictures say what is there: paths exist, commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    ROOT.glob("docs/**/*.md")
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#|mailto:)([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text("utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}, which is not there"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_and_files_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE))
    for code in re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL):
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", code):
            assert target in targets, f"{document.name}: there is no `make {target}`"
        for path in re.findall(r"\b(?:examples|docs|deploy|tests|benchmarks)/[\w./-]+\.(?:yaml|py|md|sh|lock)\b", code):
            assert "NNNN" in path or (ROOT / path).exists(), f"{document.name}: there is no {path}"
        for module in re.findall(r"python -m ((?:benchmarks|trainer|service)\.[\w.]+)", code):
            assert (ROOT / (module.replace(".", "/") + ".py")).exists(), f"{document.name}: there is no module {module}"


def test_commands_exist() -> None:
    from typer.main import get_command

    from service.cli.main import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    for document in DOCUMENTS:
        for code in re.findall(r"```.*?```|`[^`\n]+`", document.read_text("utf-8"), flags=re.DOTALL):
            for name in re.findall(r"(?:^|[\s/`])evenkeel ([a-z][a-z-]+)\b", code):
                assert name in commands, f"{document.name}: there is no command `evenkeel {name}`"


def test_the_index_of_decisions_is_whole() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text("utf-8")
    for path in sorted((ROOT / "docs" / "adr").glob("0*.md")):
        title, _, status, *_ = path.read_text("utf-8").splitlines()
        number, _, what = title.removeprefix("# ").partition(": ")
        date, _, status = status.partition(" · ")
        assert number == path.name[:4], f"{path.name}: its title has another number"
        assert f"| [{number}]({path.name}) | {what} | {date} | {status} |" in index, f"docs/adr/README.md: {path.name}"
