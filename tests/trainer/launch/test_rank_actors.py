"""Which actor is which rank, and what its process is told of its place."""

from __future__ import annotations

from trainer.launch.rank_actors import places
from trainer.launch.ray_rank import Place, Seat


def test_ranks_of_a_host_are_consecutive_in_the_order_of_its_gpus() -> None:
    seats = [
        Seat("b", "10.0.0.2", ("10",)),
        Seat("a", "10.0.0.1", ("1",)),
        Seat("b", "10.0.0.2", ("9",)),
        Seat("a", "10.0.0.1", ("0",)),
        Seat("b", "10.0.0.2", ("11",)),
    ]
    assert places(seats) == [
        Place(1, 5, 1, 3, ("9", "10", "11")),
        Place(4, 5, 1, 2, ("0", "1")),
        Place(0, 5, 0, 3, ("9", "10", "11")),
        Place(3, 5, 0, 2, ("0", "1")),
        Place(2, 5, 2, 3, ("9", "10", "11")),
    ]


def test_ranks_without_gpus_keep_the_order_of_their_actors_and_see_none_hidden() -> None:
    first, second = places([Seat("a", "10.0.0.1", ()), Seat("a", "10.0.0.1", ())])
    assert (first.rank, second.rank) == (0, 1)
    assert first.environment() == {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_a_rank_sees_the_gpus_of_all_ranks_of_its_host() -> None:
    found = places([Seat("a", "10.0.0.1", ("3",)), Seat("a", "10.0.0.1", ("1",)), Seat("b", "10.0.0.2", ("0",))])
    assert [place.environment()["CUDA_VISIBLE_DEVICES"] for place in found] == ["1,3", "1,3", "0"]
    assert [place.environment()["LOCAL_RANK"] for place in found] == ["1", "0", "0"]
