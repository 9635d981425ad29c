"""The site of docs/: each public name has a page, pictures are current, links lead to pages, nothing is loaded."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from typer.main import get_command

from deploy.site import hooks
from deploy.site.drawing import Arrow, Box, draw
from deploy.site.pictures import PICTURES
from deploy.site.reference import fields, python_names
from deploy.site.reference.pages import PAGES
from deploy.site.reference.text import WIDTH, docstring
from service.app import create_app
from service.cli import main
from service.core.environment import VARIABLES
from service.core.settings import Settings
from service.ops.metrics import Metrics
from trainer.spec import DatasetSpec, JobSpec

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_the_code_draws(name: str) -> None:
    assert (DOCS / "pictures" / f"{name}.svg").read_text("utf-8") == PICTURES[name](), (
        f"docs/pictures/{name}.svg is out of date: run `make pictures`"
    )


def test_generated_pages_are_not_kept_and_have_a_section_that_links_lead_to() -> None:
    sections = re.findall("^## (.*)$", (DOCS / "reference" / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    assert [section.lower() for section in sections] == list(PAGES)
    kept = {path.stem for path in (DOCS / "reference").glob("*.md")}
    assert not kept & set(PAGES), "make docs makes these pages: take them out of docs/reference"


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    schema: dict[str, Any] = create_app(Settings(home=tmp_path_factory.mktemp("home"))).openapi()
    return schema


def _commands(command: Any, name: str = "evenkeel") -> Iterator[str]:
    below = getattr(command, "commands", {})
    if name != "evenkeel":
        yield name
    for under, one in below.items():
        if not one.hidden:
            yield from _commands(one, f"{name} {under}")


def _fields(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[str]:
    """The names of the fields of a document, at any depth."""
    if model in seen:
        return set()
    seen.add(model)
    below = [part for field in model.model_fields.values() for part in fields._models(field.annotation)]
    return set(model.model_fields).union(*(_fields(part, seen) for part in below))


def test_each_public_name_has_a_place_on_its_page(rest: dict[str, Any]) -> None:
    alerts = yaml.safe_load((DOCS.parent / "deploy/prometheus/alerts.yml").read_text("utf-8"))["groups"]
    modules = python_names.MODULES.items()
    names = {
        "dataset": {f"`{name}`:" for name in _fields(DatasetSpec, set())},
        "job": {f"`{name}`:" for name in _fields(JobSpec, set()) - {"kind"}},
        "settings": {f"`EVENKEEL_{one.name}`:" for variables in VARIABLES.values() for one in variables},
        "commands": {f"# {name}\n" for name in _commands(get_command(main.app))},
        "rest": {f"### {method.upper()} {path}\n" for path, methods in rest["paths"].items() for method in methods},
        "metrics": {f"`{family.name}" for family in Metrics().families()},
        "alerts": {f"## {rule['alert']}\n" for group in alerts for rule in group["rules"]},
        "python": {
            f"### {name}\n" for module, chosen in modules for name in chosen or importlib.import_module(module).__all__
        },
    }
    assert set(names) == set(PAGES)
    for page, expected in names.items():
        text = PAGES[page]()
        assert expected, page
        assert {name for name in expected if name not in text} == set(), page


def test_a_field_that_kinds_share_is_said_once() -> None:
    text = PAGES["job"]()
    assert text.count("- `focal_gamma`: ") == text.count("- `embedding_dim`: ") == 1
    assert "\n- as described in [model](#model): `focal_gamma`, `focal_alpha`, `embedding_dim`" in text


def test_an_arrow_to_a_box_that_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError, match="store"):
        draw("title", {"rows": Box(0, 0, "rows")}, [Arrow("rows", "store")])


def test_a_type_without_words_is_refused() -> None:
    class Odd(BaseModel):
        field: complex

    with pytest.raises(TypeError, match=r"complex.*: .*add them to _type"):
        list(fields._lines(Odd, {Odd: "odd"}))


def test_a_docstring_becomes_prose_lists_and_code() -> None:
    def example() -> None:
        """Return ``x`` of :class:`trainer.spec.JobSpec`.

        Args:
            first: its first line, which is long enough that it goes on in another one, as it is here and in other
                places of the code, and so on.

        Example:
            >>> 1 + 1
            2
        """

    shown = docstring(example)
    assert shown.startswith("Return `x` of `trainer.spec.JobSpec`.\n\nArgs:\n\n- `first`: its first line")
    assert shown.endswith("```python\n>>> 1 + 1\n2\n```")
    assert max(map(len, shown.splitlines())) <= WIDTH


def test_a_page_of_the_site_that_would_load_from_elsewhere_is_refused() -> None:
    page = Page(None, File("guide.md", "docs", "site", use_directory_urls=False), MkDocsConfig())
    for text in ('<script src="https://cdn.example/x.js">', '<link rel="stylesheet" href="//fonts.example/f.css">'):
        with pytest.raises(PluginError, match=r"guide.md loads from elsewhere: .*keep the file in docs/"):
            hooks.on_post_page(text, page, MkDocsConfig())
    local = '<a href="https://example.com">there</a><script src="assets/x.js"></script>'
    assert hooks.on_post_page(local, page, MkDocsConfig()) == local


def test_a_notebook_is_a_page() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": [{"output_type": "stream", "text": ["1\n"]}]},
    ]
    page = "# Title\ntext\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n"
    assert hooks.as_markdown(json.dumps({"cells": cells})) == page


def test_links_of_the_site_lead_to_pages_and_name_source_files() -> None:
    page = Page(None, File("get_started.md", "docs", "site", use_directory_urls=False), MkDocsConfig())
    text = "[a](docs/guides/data.md#texts) [b](CONTRIBUTING.md) [c](trainer/spec/job.py)\n```\n[d](x.py)\n```"
    turned = hooks.on_page_markdown(text, page, MkDocsConfig(), Files([]))
    assert turned == "[a](guides/data.md#texts) [b](contributing.md) c\n```\n[d](x.py)\n```"
    generated = hooks.on_page_markdown("[a](docs/reference/README.md#job)", page, MkDocsConfig(), Files([]))
    assert generated == "[a](reference/job.md)"
