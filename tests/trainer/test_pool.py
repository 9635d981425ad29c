"""The pool of ranks itself: results in rank order, and every way of failing is a failure that tells why, not a hang."""

import os
import time

import pytest

pytestmark = pytest.mark.xdist_group("ranks")


def add_ranks(number):
    import torch
    import torch.distributed as dist

    total = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def process_id():
    return os.getpid()


def fail_on(rank):
    import torch
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise KeyError("the cause")
    dist.all_reduce(torch.zeros(1))


def die_on(rank):
    import torch.distributed as dist

    if dist.get_rank() == rank:
        print("last words", flush=True)
        os._exit(7)


def sleep_long():
    time.sleep(600)


def give_back_a_lambda():
    return lambda: None


def test_results_come_in_rank_order_and_processes_are_kept(ranks):
    assert ranks(2).run(add_ranks, 10) == [(0, 21), (1, 21)]
    first = ranks(2).run(process_id)
    assert ranks(2).run(process_id) == first


def test_a_rank_that_raises_shows_its_traceback_and_frees_the_others(ranks):
    started = time.monotonic()
    with pytest.raises(AssertionError, match="the cause"):
        ranks(2).run(fail_on, 1, timeout_seconds=200)
    assert time.monotonic() - started < 100
    assert ranks(2).run(add_ranks, 0) == [(0, 1), (1, 1)]


def test_a_rank_that_dies_shows_its_exit_code_and_output(ranks):
    with pytest.raises(AssertionError, match="exit code 7") as caught:
        ranks(2).run(die_on, 0)
    assert "last words" in str(caught.value)


def test_a_rank_that_hangs_shows_where(ranks):
    with pytest.raises(AssertionError, match="in sleep_long"):
        ranks(1).run(sleep_long, timeout_seconds=0.5)


def test_a_result_that_cannot_be_pickled_is_named(ranks):
    with pytest.raises(AssertionError, match="cannot be pickled"):
        ranks(1).run(give_back_a_lambda)
