"""What a rank uses and lacks of processors and memory: from the kernel's figures, and beside programs that take it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trainer.runs import starvation
from trainer.runs.starvation import Starvation, in_words


def write(proc: Path, threads: dict[int, tuple[int, int]], busy: int = 0, stolen: int = 0) -> None:
    for tid, (ran, waited) in threads.items():
        folder = proc / "self" / "task" / str(tid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"{ran} {waited} 7\n")
    (proc / "stat").write_text(f"cpu  {busy} 0 0 500 5 0 0 {stolen} 0 0\ncpu0 1 2 3\n")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starvation, "INTERVAL_SECONDS", 0.0)


def test_it_is_the_share_of_the_last_interval(tmp_path: Path) -> None:
    write(tmp_path, {1: (1000, 5000), 2: (50, 50)})
    measured = Starvation(tmp_path)
    write(tmp_path, {1: (1600, 5300), 3: (300, 100)})  # the third is new
    assert measured.use().starved == 400 / 1300
    assert measured.use().starved == 0.0


def test_processors_and_memory_are_of_the_last_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 104.0))
    monkeypatch.setattr(starvation.time, "monotonic", lambda: next(clock))
    write(tmp_path, {1: (0, 0)})
    statm = tmp_path / "self" / "statm"
    statm.write_text("900 30 20 1 0 5 0\n")
    measured = Starvation(tmp_path)
    write(tmp_path, {1: (6 * 10**9, 0), 2: (4 * 10**9, 0)})
    statm.write_text("900 50 20 1 0 5 0\n")
    assert measured.use() == (0.0, 2.5, 50 * resource.getpagesize())


def test_memory_is_known_before_the_first_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starvation, "INTERVAL_SECONDS", 1e9)
    use = Starvation().use()
    assert (use.starved, use.cores) == (0.0, 0.0)
    assert use.memory_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_the_host_of_a_virtual_machine_takes_its_share(tmp_path: Path) -> None:
    write(tmp_path, {1: (0, 0)}, busy=100, stolen=10)
    measured = Starvation(tmp_path)
    write(tmp_path, {1: (1000, 0)}, busy=160, stolen=50)
    assert measured.use().starved == 40 / 100


def test_it_is_measured_anew_after_an_interval_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starvation, "INTERVAL_SECONDS", 1e9)
    write(tmp_path, {1: (0, 0)})
    measured = Starvation(tmp_path)
    write(tmp_path, {1: (0, 1000)})
    assert measured.use().starved == 0.0


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu 1 2\n", "cpu a b c d e f g h\n"])
def test_without_figures_nothing_is_lacking(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    for proc in (tmp_path, tmp_path / "none"):
        assert Starvation(proc).use() == (0.0, 0.0, 0)


@pytest.mark.process
def test_a_process_beside_others_on_one_processor_is_starved() -> None:
    one = min(os.sched_getaffinity(0))
    burn = f"import os; os.sched_setaffinity(0, [{one}])\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(3)]
    ours = (
        f"import os, time; os.sched_setaffinity(0, [{one}])\n"
        "from trainer.runs import starvation\n"
        "starvation.INTERVAL_SECONDS = 0\n"
        "measured = starvation.Starvation()\n"
        "while time.process_time() < 0.3: pass\n"
        "begun = time.process_time()\n"
        "while time.process_time() < begun + 0.2: pass\n"
        "print(measured.use().starved)\n"
    )
    try:
        done = subprocess.run([sys.executable, "-c", ours], capture_output=True, text=True, check=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert in_words(float(done.stdout)) is not None, done.stdout


def test_it_is_said_from_a_limit_on() -> None:
    assert in_words(None) is None
    assert in_words(starvation.STARVED - 0.01) is None
    assert "got 35% of the processor time that they wanted" in (in_words(0.65) or "")
