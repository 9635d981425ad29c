"""Which pieces ranks read: rank 0 finds them, the others listen, and what all have read is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from torch.distributed import PrefixStore, TCPStore

from trainer.data.one_pass.following import finder, listener
from trainer.data.sources.followed_folder import EndOfFolder, Taken
from trainer.spec import Follow

NUM_PIECES, NUM_RANKS = 40, 3


def file(number: int) -> Taken:
    return Taken(number, f"{number}.parquet", 1, 2)


class Folder:
    """A folder whose files are all there, then its end."""

    uri = "rows"
    follow = Follow(poll_seconds=0.01)

    def begin(self, pieces: Sequence[Taken]) -> None: ...

    def next(self, number: int) -> Taken:
        if number == NUM_PIECES:
            raise EndOfFolder
        return file(number)

    def pieces_until(self, number: int) -> list[Taken]:
        return []

    def figures(self, number: int) -> dict[str, float]:
        return {}


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connected(store: TCPStore) -> PrefixStore:
    """What a rank of a process group has: a connection of its own, under the group's prefix."""
    return PrefixStore("group", TCPStore("127.0.0.1", store.port, wait_for_workers=False))


def test_each_rank_takes_every_piece_and_none_is_kept(store):
    folder, stopped = Folder(), threading.Event()
    find = finder(folder, connected(store), range(1, NUM_RANKS))
    takes = [listener(connected(store), rank, "rows", folder.follow) for rank in range(1, NUM_RANKS)]
    before, most = store.num_keys(), 0
    for number in range(NUM_PIECES + 1):
        expected = find(number, stopped)
        assert expected == (file(number) if number < NUM_PIECES else None)
        # The last rank is some pieces behind.
        taken = [take(number, stopped) for take in takes[:-1]]
        if number >= 5:
            assert takes[-1](number - 5, stopped) == file(number - 5)
        assert taken == [expected] * len(taken)
        most = max(most, store.num_keys() - before)
    assert [takes[-1](number, stopped) for number in range(NUM_PIECES - 4, NUM_PIECES + 1)][-1] is None
    # What each rank has read, the pieces that the last one has not, and one or two that nobody has seen to yet.
    assert most <= NUM_RANKS - 1 + 5 + 2


def test_nothing_is_forgotten_before_all_ranks_have_begun(store):
    folder, stopped = Folder(), threading.Event()
    find = finder(folder, connected(store), range(1, NUM_RANKS))
    first, second = (listener(connected(store), rank, "rows", folder.follow) for rank in (1, 2))
    for number in range(10):
        find(number, stopped)
        first(number, stopped)
    assert [second(number, stopped) for number in range(10)] == [file(n) for n in range(10)]
