"""README, guides and pictures say what is there: paths exist, commands exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
# Documents of what there is today: reports, decisions and the changelog may name what has gone since.
CURRENT = [
    path
    for path in DOCUMENTS
    if path.name != "CHANGELOG.md" and not {"reports", "adr"} & set(path.relative_to(ROOT).parts)
]
PACKAGES = ("embeddings", "trainer", "service")
MAX_WIDTH = 160
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in LINK.findall(document.read_text("utf-8")):
        there = document.parent / target if target else document
        assert there.exists(), f"{document.name} links to {target}, which is not there"
        if anchor and there.suffix == ".md":
            assert anchor in _anchors(there), f"{document.name} links to {target}#{anchor}, which has no such heading"


@pytest.mark.parametrize("document", CURRENT, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_source_files_exist(document: Path) -> None:
    named = r"\b((?:tests/)?(?:embeddings|trainer|service)/[a-z0-9_/]+\.(?:py|h|cpp))\b"
    for path in re.findall(named, document.read_text("utf-8")):
        # docs/development/add_a_model.md has a model of its own as an example.
        assert (ROOT / path).exists() or "mean_product" in path, f"{document.name}: there is no {path}"


def test_files_that_where_a_change_goes_names_exist() -> None:
    """Also those named relative to a folder of their entry (`registry.py` there)."""
    text = (ROOT / "docs" / "development" / "where_a_change_goes.md").read_text("utf-8")
    missing = []
    for entry in text.split("\n- **")[1:]:
        paths = re.findall(r"`(\.?[\w./-]+\.(?:py|h|cpp|md|ya?ml|json|txt|toml|html|Dockerfile|example))`", entry)
        folders = {
            folder for path in re.findall(r"`([\w./-]+/[\w./-]*)`", entry) for folder in (path, *Path(path).parents)
        }
        missing += [
            path
            for path in paths
            if not re.search(r"\b(NAME|FAMILY|GROUP)\b", path)
            and not (ROOT / path).exists()
            and not any((ROOT / folder / path).exists() for folder in folders)
        ]
    assert missing == []


def test_the_index_of_documents_is_whole() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / target).resolve() for target, _ in LINK.findall(index.read_text("utf-8")) if target}
    reports = ROOT / "docs" / "reports" / "README.md"
    listed |= {(reports.parent / target).resolve() for target, _ in LINK.findall(reports.read_text("utf-8")) if target}
    missing = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path.parent.name != "adr" and path not in listed]
    assert missing == [index], f"docs/README.md or docs/reports/README.md leaves out {missing}"


def test_every_setting_that_the_code_reads_is_documented() -> None:
    from service.core import settings
    from service.core.environment import VARIABLES
    from service.jobs.executors.registry import EXECUTORS

    days = [f"keep_{field.name}_days" for field in dataclasses.fields(settings.RetentionDays)]
    asked = {name.upper() for name in (*settings._TEXTS, *settings.LEAST, *days)}
    asked |= set(re.findall(r"""(?:given\.get|_one_of)\("([A-Z_]+)\"""", Path(settings.__file__).read_text("utf-8")))
    text = "".join(path.read_text("utf-8") for part in PACKAGES for path in (ROOT / part).rglob("*.py"))
    read = {f"EVENKEEL_{name}" for name in asked} | set(re.findall(r"""["'](EVENKEEL_[A-Z_]+)["']""", text))
    # Told by the service to its runs; of tests.
    read -= {f"EVENKEEL_RUN_{name}" for name in ("DIR", "ID", "LAUNCHED", "ATTEMPT", "URL", "TOKEN")}
    read -= {"EVENKEEL_CLUSTER_RUNS", "EVENKEEL_WRITE_EXAMPLES"}
    documented = [f"EVENKEEL_{one.name}" for variables in VARIABLES.values() for one in variables]
    of_executors = {f"EVENKEEL_{name.upper()}_{option}" for name, kind in EXECUTORS.items() for option in kind.options}
    assert len(set(documented)) == len(documented)
    assert set(documented) == read | of_executors


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_short_enough_to_read(document: Path) -> None:
    long = [number for number, line in enumerate(document.read_text("utf-8").splitlines(), 1) if len(line) > MAX_WIDTH]
    assert long == [], f"{document.name}: lines {long} are longer than {MAX_WIDTH} characters"


def test_lists_are_written_so_that_the_site_shows_lists() -> None:
    """Markdown of the site wants a list in a list indented by four, and an empty line before a list."""
    wrong = []
    for path in DOCUMENTS:
        before = ""
        for line in re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE).splitlines():
            begins = re.match(r"([-*]|\d+\.) ", line) and before.strip()
            if re.match(r"  [-*] ", line) or (begins and not re.match(r"\s*([-*]|\d+\.) | {2,}\S|#", before)):
                wrong.append(f"{path.name}: {line}")
            before = line
    assert wrong == []


def test_the_python_of_the_readme_runs() -> None:
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    found: dict[str, object] = {}
    exec(compile(text, "README.md", "exec"), found)
    assert found["vectors"].shape == (1, 32)  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", range(5))
def test_the_python_of_the_library_runs(number: int) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "library.md").read_text("utf-8"), flags=re.DOTALL
    )
    assert len(blocks) == 5
    exec(compile(blocks[number], f"library.md, block {number}", "exec"), {"__name__": "library"})


def test_the_specs_of_the_reference_are_valid_and_whole() -> None:
    from trainer.spec import DatasetSpec, JobSpec, Publish, parse_dataset, parse_job

    text = (ROOT / "docs" / "reference" / "spec.md").read_text("utf-8")
    dataset, job = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL))
    parse_job(job).against(parse_dataset(dataset))
    assert set(job) == set(JobSpec.model_fields)
    assert set(job["publish"]) == set(Publish.model_fields)
    assert set(dataset) == set(DatasetSpec.model_fields) - {"order"}  # timestamp or order


def test_the_models_that_read_numbers_are_listed() -> None:
    from trainer.spec.models.registry import MODELS

    text = (ROOT / "docs" / "guides" / "data.md").read_text("utf-8")
    (listed,) = re.findall(r"^`dense` features go to (.*?)\. Mean,", text, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == {kind for kind, spec in MODELS.items() if spec.reads_numbers}


def test_the_job_of_the_readme_is_valid() -> None:
    from trainer.spec import parse_job

    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    assert parse_job(yaml.safe_load(text)).publish is not None


def test_the_jobs_of_a_daily_refresh_are_valid_and_alike() -> None:
    from trainer.spec import parse_dataset, parse_job

    text = (ROOT / "docs" / "guides" / "refresh.md").read_text("utf-8")
    first, daily = re.findall(r"```yaml\n(# (?:first|daily)\.yaml\n.*?)```", text, flags=re.DOTALL)
    dataset, job = yaml.safe_load_all(first)
    parsed = [parse_job(one).against(parse_dataset(dataset)) for one in (job, yaml.safe_load(daily))]
    # With fewer days than before the gate may hold each refresh.
    assert len({one.dataset.window.days for one in parsed if one.dataset.window}) == 1
    assert len({one.model.model_dump_json() for one in parsed}) == 1


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_and_files_exist(document: Path) -> None:
    # A command of an earlier commit says so, behind it or in its block.
    text = re.sub(r"`[^`\n]+`\s+of commit [0-9a-f]{8}", "", document.read_text("utf-8"))
    text = re.sub(r"```[^`]*# of commit [0-9a-f]{8}[^`]*```", "", text)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE))
    for code in re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL):
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", code):
            assert target in targets, f"{document.name}: there is no `make {target}`"
        for path in re.findall(r"\b(?:examples|docs|deploy|tests|benchmarks)/[\w./-]+\.(?:yaml|py|md|sh|lock)\b", code):
            assert "NNNN" in path or (ROOT / path).exists(), f"{document.name}: there is no {path}"
        for module in re.findall(r"python -m ((?:benchmarks|trainer|service)\.[\w.]+)", code):
            place = ROOT / module.replace(".", "/")
            there = place.with_suffix(".py").exists() or (place / "__main__.py").exists()
            assert there, f"{document.name}: there is no module {module}"


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
