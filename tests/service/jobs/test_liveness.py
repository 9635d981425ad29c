"""Silence and running time, whatever happens to clocks, the machine and the one who looks."""

from __future__ import annotations

from service.jobs.liveness import Liveness


class Clocks:
    """``mono`` stands still while the machine sleeps, ``boot`` does not."""

    def __init__(self) -> None:
        self.mono, self.boot = 100.0, 5000.0

    def pass_(self, seconds: float) -> None:
        self.mono += seconds
        self.boot += seconds

    def sleep(self, seconds: float) -> None:
        self.boot += seconds


def watch_of(clocks: Clocks, interval: float = 300.0) -> Liveness:
    return Liveness(interval, lambda: clocks.mono, lambda: clocks.boot)


ATTEMPT = (1, "lease")


def rounds(watch: Liveness, clocks: Clocks, seconds: float, size: int = 10, each: float = 10.0) -> float:
    """Looks every ten seconds; the silence seen at the last look."""
    silent = watch.look("job", ATTEMPT, size, 0).silent_seconds
    for _ in range(int(seconds / each)):
        clocks.pass_(each)
        watch.begin_round({"job"})
        silent = watch.look("job", ATTEMPT, size, 0).silent_seconds
    return silent


def test_silence_is_time_without_anything_new() -> None:
    clocks = Clocks()
    watch = watch_of(clocks)
    assert rounds(watch, clocks, 200) == 200
    assert rounds(watch, clocks, 50, size=11) == 50
    assert rounds(watch, clocks, 310, size=11) == 360


def test_a_machine_that_slept_gives_every_run_a_whole_interval_more() -> None:
    clocks = Clocks()
    watch = watch_of(clocks)
    assert rounds(watch, clocks, 290) == 290
    clocks.sleep(8 * 3600)
    clocks.pass_(10)
    assert watch.begin_round({"job"})
    assert watch.look("job", ATTEMPT, 10, 0).silent_seconds == 0
    assert rounds(watch, clocks, 290) == 290
    assert rounds(watch, clocks, 20) > 300


def test_one_that_was_stopped_itself_blames_nobody() -> None:
    clocks = Clocks()
    watch = watch_of(clocks)
    assert rounds(watch, clocks, 100) == 100
    clocks.pass_(3600)
    assert watch.begin_round({"job"})
    assert watch.look("job", ATTEMPT, 10, 0).silent_seconds == 0
    assert not watch.begin_round({"job"})


def test_small_drifts_of_the_clocks_are_no_sleep() -> None:
    clocks = Clocks()
    watch = watch_of(clocks)
    for _ in range(40):
        rounds(watch, clocks, 10)
        clocks.sleep(0.5)
        assert not watch.begin_round({"job"})
    assert watch.look("job", ATTEMPT, 10, 0).silent_seconds == 400


def test_running_time_is_asked_of_the_wall_clock_once() -> None:
    clocks = Clocks()
    watch = watch_of(clocks)
    assert watch.look("job", ATTEMPT, 0, 0).running_seconds == 0
    clocks.pass_(10)
    assert watch.look("job", ATTEMPT, 0, 1e9).running_seconds == 10, "the wall clock was set forward"
    after_a_restart = watch_of(clocks)
    assert after_a_restart.look("job", ATTEMPT, 0, 50).running_seconds == 50
    assert after_a_restart.look("job", (2, "other"), 0, -5).running_seconds == 0, "set back, another attempt"


def test_a_new_attempt_and_a_job_that_left_begin_anew() -> None:
    clocks = Clocks()
    watch = watch_of(clocks)
    rounds(watch, clocks, 200)
    assert watch.look("job", (2, "other"), 10, 0).silent_seconds == 0
    clocks.pass_(100)
    watch.begin_round(set())
    watch.begin_round({"job"})
    assert watch.look("job", (2, "other"), 10, 0).silent_seconds == 0
