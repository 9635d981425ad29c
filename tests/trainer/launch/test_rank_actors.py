"""Which actor is which rank, and what its process is told of its place."""

from __future__ import annotations

import contextlib

import pytest

from trainer.launch import on_ray
from trainer.launch.driver import RanksFailed
from trainer.launch.rank_actors import RankEnvironment, Seat, rank_environments
from trainer.runs.failures import ResourceError


def test_ranks_of_a_host_are_consecutive_in_the_order_of_its_gpus() -> None:
    seats = [
        Seat("b", "10.0.0.2", ("10",)),
        Seat("a", "10.0.0.1", ("1",)),
        Seat("b", "10.0.0.2", ("9",)),
        Seat("a", "10.0.0.1", ("0",)),
        Seat("b", "10.0.0.2", ("11",)),
    ]
    assert rank_environments(seats) == [
        RankEnvironment(1, 5, 1, 3, ("9", "10", "11")),
        RankEnvironment(4, 5, 1, 2, ("0", "1")),
        RankEnvironment(0, 5, 0, 3, ("9", "10", "11")),
        RankEnvironment(3, 5, 0, 2, ("0", "1")),
        RankEnvironment(2, 5, 2, 3, ("9", "10", "11")),
    ]


def test_ranks_without_gpus_keep_the_order_of_their_actors_and_see_none_hidden() -> None:
    first, second = rank_environments([Seat("a", "10.0.0.1", ()), Seat("a", "10.0.0.1", ())])
    assert (first.rank, second.rank) == (0, 1)
    assert first.variables() == {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_a_rank_sees_the_gpus_of_all_ranks_of_its_host() -> None:
    found = rank_environments(
        [Seat("a", "10.0.0.1", ("3",)), Seat("a", "10.0.0.1", ("1",)), Seat("b", "10.0.0.2", ("0",))]
    )
    assert [environment.variables()["CUDA_VISIBLE_DEVICES"] for environment in found] == ["1,3", "1,3", "0"]
    assert [environment.variables()["LOCAL_RANK"] for environment in found] == ["1", "0", "0"]


def test_what_a_rank_raised_is_a_failure_of_the_ranks_whatever_its_class(make_run, monkeypatch) -> None:
    """The driver then tells what the rank recorded. Ray's error of a rank is an instance of the rank's own too."""
    from ray.exceptions import ActorDiedError, RayTaskError

    error = RayTaskError("train", "a traceback", ResourceError("no GPU here")).as_instanceof_cause()
    assert isinstance(error, ResourceError)

    def train_on(*_: object) -> None:
        raise error

    monkeypatch.setattr(on_ray, "connected", contextlib.nullcontext)
    monkeypatch.setattr(on_ray, "_fitted", lambda run: run)
    monkeypatch.setattr(on_ray, "rank_actors", lambda *_: contextlib.nullcontext([]))
    monkeypatch.setattr(on_ray, "train_on", train_on)
    with pytest.raises(RanksFailed, match=r"^no GPU here$") as told:
        on_ray.start_ranks(make_run())
    assert not told.value.died
    error = ActorDiedError()
    with pytest.raises(RanksFailed) as told:
        on_ray.start_ranks(make_run("died"))
    assert told.value.died
