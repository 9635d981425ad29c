"""Hooks of mkdocs for the generated reference, pages outside docs/, links to both, and the navigation."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from deploy.site.reference.pages import PAGES

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "get_started.md": "README.md",
    "examples.md": "examples/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "notebooks/quickstart.md": "examples/notebooks/quickstart.ipynb",
    "notebooks/downstream_model.md": "examples/notebooks/downstream_model.ipynb",
    "notebooks/optimizers.md": "examples/notebooks/optimizers.ipynb",
}
"""Source file of each page that lies outside docs/."""
_PAGE_OF = {source: page for page, source in OUTSIDE.items()}
_FENCED = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]+\bsrc=[\"']?(?:https?:)?//[^\"'\s>]+"
    r"|<link[^>]+\brel=[\"']?(?:stylesheet|preload|preconnect|icon)[\"']?[^>]+\bhref=[\"']?(?:https?:)?//[^\"'\s>]+"
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each entry of the navigation that ends in ``*.md`` by the files that match it."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    config.nav = _expanded(config.nav, Path(config.docs_dir), named)
    return config


def _expanded(entry: Any, docs: Path, named: set[str]) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(_listed(below), docs, named) for title, below in entry.items()}
    if not isinstance(entry, list):
        return entry
    entries: list[Any] = []
    for item in entry:
        if isinstance(item, str) and item.endswith("*.md"):
            found = [path.relative_to(docs).as_posix() for path in docs.glob(item)]
            # README first: it is the page of its section.
            entries += sorted(set(found) - named, key=lambda path: (not path.endswith("README.md"), path))
        else:
            entries.append(_expanded(item, docs, named))
    return entries


def _listed(below: Any) -> Any:
    return [below] if isinstance(below, str) and below.endswith("*.md") else below


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of files outside docs/, and those that are generated from the code."""
    for name, generate in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=generate()))
    for page, source in OUTSIDE.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=as_markdown(text) if source.endswith(".ipynb") else text))
    return files


def as_markdown(notebook: str) -> str:
    """Return a notebook's text, code and what the code printed as a page."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [f"```text\n{''.join(output['text']).rstrip()}\n```" for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages; links to source code become plain text.

    The repository has no generated pages: its links to them lead to a section of docs/reference/README.md.
    """
    source = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def turned(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = _PAGE_OF.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if there is None:
            return text
        if there == "reference/README.md" and anchor[1:] in PAGES:
            there, anchor = f"reference/{anchor[1:]}.md", ""
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    parts = _FENCED.split(markdown)
    return "".join(part if number % 2 else _LINK.sub(turned, part) for number, part in enumerate(parts))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that loads a resource from another site.

    Raises:
        PluginError: The page loads a file from elsewhere, so it would not work offline.
    """
    if loaded := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {loaded[0]}: keep the file in docs/")
    return output
