"""Which tests one worker of pytest-xdist takes one after the other.

pytest-xdist 3.8 has groups by mark (``--dist loadgroup``), which it writes into the tests' ids; with pytest 9.2 that
does nothing, without a word. Here a file says of which group it is. Its tests stay together: what its module's fixtures
make is made once.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def group_of(file: str) -> str:
    """``ray`` for files with a test that is marked so: a cluster is a dozen processes, and starts slowly beside
    another. NAME for those with ``pytest.mark.xdist_group("NAME")``; of all others the file."""
    text = (ROOT / file).read_text("utf-8") if (ROOT / file).exists() else ""
    if "mark.ray" in text:
        return "ray"
    named = re.search(r'mark\.xdist_group\("(\w+)"\)', text)
    return named[1] if named else file


def groups(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler of files in the order in which they were collected, those of a group as one."""
    from xdist.scheduler import LoadScopeScheduling  # a single test does without

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    return Groups(config, log)
