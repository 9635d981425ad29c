"""axe-core on a page of a browser: the script that a package of the lock for tests ships."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

RUN = """
async (rules) => {
  const found = await axe.run(document, {resultTypes: ["violations"], ...(rules ? {runOnly: rules} : {})});
  const told = (id, {html, failureSummary}) => `${id}: ${html.slice(0, 120)}: ${failureSummary.slice(0, 200)}`;
  return found.violations.flatMap(({id, nodes}) => nodes.map((node) => told(id, node)));
}
"""


@functools.cache
def script() -> str:
    """Skips the test where the package is missing."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe-core is not installed")
    return Path(found.origin).with_name("axe.min.js").read_text("utf-8")


def violations(page: Any) -> list[tuple[str, str]]:
    """Theme and element of each break of a rule of axe-core, its best practices included.

    A theme changes colours alone: the second one is checked for contrast.
    """
    page.evaluate(script())
    found = []
    for theme, rules in (("light", None), ("dark", ["color-contrast"])):
        page.emulate_media(color_scheme=theme)
        found += [(theme, one) for one in page.evaluate(RUN, rules)]
    return found
