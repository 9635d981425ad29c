"""README, guides and pictures say what is there: paths exist, commands exist, the file tree is whole."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    ROOT.glob("docs/**/*.md")
)
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#|mailto:)([^)#\s]+)[^)]*\)")
TREE_LINE = re.compile(r"^(?P<indent> *)(?P<names>\S[^#]*?)\s+# ")


def tracked_files() -> set[str]:
    try:
        listing = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return {name for name in listing.stdout.splitlines() if (ROOT / name).is_file()}
    except (OSError, subprocess.CalledProcessError):
        return {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if ".venv" not in path.parts}


def tree_paths() -> list[str]:
    """The paths of the README's file tree: a folder's line ends in `/`, `{a,b}.py` stands for several files."""
    block = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)[-1]
    paths: list[str] = []
    folders: list[tuple[int, str]] = []
    for line in block.splitlines():
        if not line.strip():
            continue
        match = TREE_LINE.match(line + " ") or re.match(r"^(?P<indent> *)(?P<names>\S+/)\s*$", line)
        assert match, f"README file tree: no purpose is given in {line!r}"
        indent = len(match["indent"])
        while folders and folders[-1][0] >= indent:
            folders.pop()
        prefix = "".join(name for _, name in folders)
        for name in match["names"].split():
            paths.append(prefix + name)
            if name.endswith("/"):
                folders.append((indent, name))
    return paths


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


@pytest.mark.process
def test_file_tree_is_whole() -> None:
    listed = tree_paths()
    assert len(listed) == len(set(listed)), "the README's file tree names something twice"
    for path in listed:
        assert (ROOT / path).exists(), f"README file tree: {path} is not there"
    covered = set(listed)
    for path in sorted(tracked_files()):
        if path.endswith(".py") and path.split("/")[0] in (
            "embeddings",
            "trainer",
            "service",
            "benchmarks",
            "examples",
        ):
            if path.endswith("__init__.py"):
                continue
            assert path in covered, f"README file tree: {path} is missing"


def test_commands_exist() -> None:
    from typer.main import get_command

    from service.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    for document in DOCUMENTS:
        for code in re.findall(r"```.*?```|`[^`\n]+`", document.read_text("utf-8"), flags=re.DOTALL):
            for name in re.findall(r"(?:^|[\s/`])evenkeel ([a-z][a-z-]+)\b", code):
                assert name in commands, f"{document.name}: there is no command `evenkeel {name}`"
