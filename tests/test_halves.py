"""tests/halves.py: every test is in one half, and what fails in either fails the whole."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("halves.py")


@pytest.fixture(scope="module")
def halves() -> Any:
    spec = importlib.util.spec_from_file_location("halves", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_one_half_takes_the_other_leaves_out(halves: Any) -> None:
    first, second = halves.halves()
    assert all((halves.ROOT / path).exists() for path in first), "a path that is not there is left out by nobody"
    assert second == ["tests", *(f"--ignore={path}" for path in first)]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("codes", [[0, 0], [0, 3], [1, 0], [2, 5]])
def test_exit_codes_and_lines_of_both(halves: Any, capfd: pytest.CaptureFixture[str], codes: list[int]) -> None:
    says = "import sys; print('from', sys.argv[1]); print('to', sys.argv[1], file=sys.stderr); sys.exit({})"
    assert halves.run_at_once([[sys.executable, "-c", says.format(code), str(code)] for code in codes]) == codes
    lines = capfd.readouterr().out.splitlines()
    for number, code in enumerate(codes, 1):
        assert {f"{number}| from {code}", f"{number}| to {code}"} <= set(lines)


@pytest.mark.parametrize("codes", [[0, 0], [0, 1], [4, 0]])
def test_the_whole_passes_where_both_do(halves: Any, monkeypatch: pytest.MonkeyPatch, codes: list[int]) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(halves, "run_at_once", lambda commands: asked.extend(commands) or codes)
    assert halves.main(["-x"]) == (0 if codes == [0, 0] else 1)
    assert [command[:3] for command in asked] == [[sys.executable, "-m", "pytest"]] * 2
    assert all(command[-1] == "-x" for command in asked)


def test_sigterm_ends_both_as_ctrl_c_does() -> None:
    """Also where SIGINT is ignored, as in a job that a shell has put into the background."""
    waits = "import time\nprint('up', flush=True)\ntry: time.sleep(600)\nexcept KeyboardInterrupt: print('torn down')"
    script = f"""
import importlib.util, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
spec = importlib.util.spec_from_file_location("halves", {str(FILE)!r})
halves = importlib.util.module_from_spec(spec)
spec.loader.exec_module(halves)
print(halves.run_at_once([[sys.executable, "-c", {waits!r}]] * 2))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        seen = {process.stdout.readline(), process.stdout.readline()}
        assert seen == {"1| up\n", "2| up\n"}
        process.send_signal(signal.SIGTERM)
        assert sorted(process.stdout.read().splitlines()) == ["1| torn down", "2| torn down", "[0, 0]"]
    assert process.wait(300) == 0
