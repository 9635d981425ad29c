"""The site of docs/: what is generated is up to date, links lead to pages, nothing is loaded from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

from deploy.site import hooks
from deploy.site.__main__ import FILES
from deploy.site.drawing import Arrow, Box, draw
from deploy.site.reference import fields
from deploy.site.reference.text import WIDTH, docstring

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", FILES)
def test_generated_files_are_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text("utf-8") == FILES[name](), (
        f"docs/{name} is out of date: run `make reference`"
    )


def test_every_generated_page_says_so_and_no_other_page_does() -> None:
    """Who edits a generated page by hand loses it."""
    said = {path.name for path in (ROOT / "docs").glob("**/*.md") if "<!-- Generated from" in path.read_text("utf-8")}
    assert said == {Path(name).name for name in FILES if name.endswith(".md")}


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
