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


@pytest.fixture(autouse=True)
def _no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of pytest in here need none of those that are installed, which take seconds to import."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


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
    assert all("-x" in command for command in asked)


IT, UNSTEADY = "test_it.py::test_it", "UNSTEADY, passed alone"
SUITES = {
    "steady": "def test_it(): pass",
    "unsteady": """
from pathlib import Path
def test_before(): pass
def test_it():
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the machine is busy")
""",
    "broken": "def test_it(): assert 0",
    "many": "import pytest\n@pytest.mark.parametrize('i', range(10))\ndef test_it(i): assert 0",
    "killed": "import os\ndef test_it(): os._exit(1)",
    "unreadable": "def test_it(: pass",
}


@pytest.mark.parametrize(
    ("suites", "exit_code", "says"),
    [
        (("steady", "steady"), 0, ["passed"]),
        (("steady", "unsteady"), 0, [f"{UNSTEADY}: two/{IT}", "passed"]),
        (("unsteady", "broken"), 1, [f"{UNSTEADY}: one/{IT}", f"FAILED: two/{IT}", "FAILED"]),
        (("broken", "unsteady"), 1, [f"{UNSTEADY}: two/{IT}", f"FAILED: one/{IT}", "FAILED"]),
        (("steady", "many"), 1, [f"FAILED: two/{IT}[{i}]" for i in sorted("0123456789")] + ["FAILED"]),
        (("killed", "steady"), 1, ["FAILED: half 1, which did not end", "FAILED"]),
        (("steady", "unreadable"), 1, ["FAILED: two/test_it.py", "FAILED"]),
    ],
)  # fmt: skip
def test_what_fails_beside_the_other_half_is_tried_once_alone(
    halves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    suites: tuple[str, str], exit_code: int, says: list[str],
) -> None:  # fmt: skip
    """Real runs of pytest over two files. A pass on the second try is told, and is never made of nothing run."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for folder, suite in zip(("one", "two"), suites, strict=True):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_it.py").write_text(SUITES[suite])
    monkeypatch.setattr(halves, "ROOT", tmp_path)
    monkeypatch.setattr(halves, "halves", lambda: [["one"], ["two"]])
    monkeypatch.setattr(halves, "MOST_TRIED_AGAIN", 9)
    assert halves.main([]) == exit_code
    lines = capfd.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split(", ")[0] == says[0] or line == says[0])
    assert [line.split(", ")[0] if line.endswith("minutes") else line for line in lines[at:]] == [
        s.removesuffix(",") for s in says
    ]
    tried_again = [line for line in lines if "once more, alone" in line]
    assert len(tried_again) == sum(suite in ("unsteady", "broken") for suite in suites)


def test_with_options_nothing_is_tried_again(
    halves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """-x stops at the first failure: that it passes later says nothing of the tests after it."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for folder, suite in (("one", "unsteady"), ("two", "steady")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_it.py").write_text(SUITES[suite])
    monkeypatch.setattr(halves, "ROOT", tmp_path)
    monkeypatch.setattr(halves, "halves", lambda: [["one"], ["two"]])
    assert halves.main(["-x"]) == 1
    assert "FAILED: one/test_it.py::test_it" in capfd.readouterr().out.splitlines()


def test_sigterm_ends_both_as_ctrl_c_does() -> None:
    """Also where SIGINT is ignored, as in a job that a shell has put into the background."""
    waits = (
        "import time\ntry:\n print('up', flush=True)\n time.sleep(600)\nexcept KeyboardInterrupt: print('torn down')"
    )
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
