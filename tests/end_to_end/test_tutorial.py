"""docs/tutorial.md does as it says: every block is run, in one shell and an empty folder."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.free_ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
PORT = "8321"


@pytest.mark.process
@pytest.mark.slow
def test_the_tutorial_does_as_it_says(tmp_path: Path) -> None:
    text = TUTORIAL.read_text("utf-8").replace(PORT, str(free_ports(1)[0]))
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "yaml", "sh", "text"}
    for kind, block in blocks:
        if kind in ("python", "yaml"):
            (name,) = re.findall(r"\A# ([a-z]+\.(?:py|yaml))\n", block)
            (tmp_path / name).write_text(block)
    script = "".join(block for kind, block in blocks if kind == "sh")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENKEEL_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "OMP_NUM_THREADS": "1"}
    # Jobs of a shell that is not interactive, such as the service, are in its group.
    shell = subprocess.Popen(
        ["bash", "-euc", "set -o pipefail\n" + script],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = shell.communicate(timeout=500)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, said
    # Six versions, and the seventh through its map.
    assert re.findall(r"^v00000(\d)  accuracy ", said, flags=re.MULTILINE) == list("1234567"), said
