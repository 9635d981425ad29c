"""Reading of a followed folder or topic in windows, which end with a file or segment, or when full. Torch-free."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.data.batches.keys import Key
from trainer.data.columns.numeric import Numeric
from trainer.data.errors import Stopped
from trainer.data.one_pass import windows
from trainer.data.one_pass.position import Place
from trainer.data.one_pass.windows import Held, RowReader, Window, window_of
from trainer.data.prepare.plan import DataPlan
from trainer.data.sources.followed_folder import EndOfFolder, FollowedFolder, Taken
from trainer.data.sources.source import Chunk
from trainer.data.sources.topics.followed_topic import FollowedTopic
from trainer.data.sources.topics.segments import Segment
from trainer.spec import Follow

if TYPE_CHECKING:
    from torch.distributed import Store

FILES = "followed.json"
"""Name of the checkpoint's file that lists the files, or segments of a topic, that were read."""
_END = json.dumps(None)


Piece = Taken | Segment
"""Unit of reading: a file of a folder, or a segment of a topic."""
Followed = FollowedFolder | FollowedTopic
"""A folder or topic that grows while it is read, piece by piece, as rank 0 sees it."""


class PieceRows(Protocol):
    """Reader of the rows of pieces, on each rank."""

    def chunks(self, piece: Any, place: Place, stopped: threading.Event, /) -> Iterator[Chunk]: ...
    def count(self, place: Place, num_rows: int, num_bad: int, /) -> Place: ...
    def close(self) -> None: ...


Take = Callable[[int, threading.Event], Piece | None]
"""Function that waits for the piece of a number and returns it; it returns None at the end of the folder or topic."""


def finder(followed: Followed, words: Store | None = None, listeners: Iterable[int] = ()) -> Take:
    """Return the function by which rank 0 finds pieces and announces them in ``words`` until all listeners took them.

    The function must be called once for each piece, in the order of their numbers. ``words`` is the process group's
    store, through which ranks exchange messages without waiting.
    """
    taken_by = [_taken_by(followed.uri, rank) for rank in listeners]
    told: deque[int] = deque()

    def forget() -> None:
        if words is None or not words.check(taken_by):
            return
        all_took = min(int(words.get(key)) for key in taken_by)
        while told and told[0] <= all_took:
            words.delete_key(_word(followed.uri, told.popleft()))

    def take(number: int, stopped: threading.Event) -> Piece | None:
        taken: Piece | None
        try:
            while (taken := followed.next(number)) is None:
                pause(stopped, followed.follow.poll_seconds)
        except EndOfFolder:
            taken = None
        if words is not None:
            forget()
            words.set(_word(followed.uri, number), _END if taken is None else json.dumps(asdict(taken)))
            told.append(number)
        return taken

    return take


def listener(words: Store, rank: int, uri: str, follow: Follow) -> Take:
    """Return the function by which another rank waits until rank 0 announces a piece, and reports that it took it."""

    def take(number: int, stopped: threading.Event) -> Piece | None:
        while not words.check([_word(uri, number)]):
            pause(stopped, min(follow.poll_seconds, 0.5))
        document = json.loads(words.get(_word(uri, number)))
        words.set(_taken_by(uri, rank), str(number))
        return None if document is None else _piece_of(document)

    return take


def _word(uri: str, number: int) -> str:
    return f"evenkeel/followed/{uri}/{number}"


def _taken_by(uri: str, rank: int) -> str:
    return f"evenkeel/followed/{uri}/taken_by/{rank}"


def pause(stopped: threading.Event, seconds: float) -> None:
    """Wait for some seconds.

    Raises:
        Stopped: ``stopped`` was set before they passed.
    """
    if stopped.wait(seconds):
        raise Stopped


class FollowingReader(RowReader):
    """Reader of the rows of pieces (files or segments) as they appear.

    ``plan`` has the columns of the folder's first file, or those that the spec declares. ``take`` returns the piece of
    a number.
    """

    def __init__(self, plan: DataPlan, keys: Sequence[Key], numeric: Sequence[Numeric], take: Take, pieces: PieceRows):
        super().__init__(plan, keys, numeric)
        assert plan.job.dataset.follow is not None
        self._take, self._pieces, self._max_rows = take, pieces, plan.job.dataset.follow.max_rows

    def windows(self, start: Place, stopped: threading.Event) -> Iterator[Window]:
        place = start
        try:
            while self._max_rows is None or place.rows < self._max_rows:
                taken = self._take(place.file, stopped)
                if taken is None:
                    return
                place = yield from self._of_piece(taken, place, stopped)
        finally:
            self._pieces.close()

    def _of_piece(self, taken: Piece, place: Place, stopped: threading.Event) -> Generator[Window, None, Place]:
        """Yield the windows of one piece from ``place`` on, and return the position after them."""
        held, counted = Held(), place
        for chunk, is_last in _with_last(self._pieces.chunks(taken, place, stopped)):
            left = None if self._max_rows is None else self._max_rows - place.rows - held.number
            ends = left is not None and len(chunk) >= left
            chunk = _first_rows(chunk, left) if left is not None and len(chunk) > left else chunk
            counted = self._pieces.count(counted, len(chunk), chunk.num_bad)
            if len(chunk):
                held.add(*self._read(chunk, place.rows + held.number))
            end = (taken.number + 1, 0) if is_last else (taken.number, chunk.end)
            if held.number and (held.number >= windows.WINDOW_ROWS or is_last or ends):
                place, ready = window_of(place, held, *end, bad=(counted.bad, counted.bad_of_block))
                held, counted = Held(), place
                # Hold no reference to the window while the caller works on it, so that its memory is freed early.
                yield ready.pop()
            if ends:
                return place
        return replace(place, file=taken.number + 1, row=0, bad=counted.bad, bad_of_block=counted.bad_of_block)


def _first_rows(chunk: Chunk, number: int) -> Chunk:
    rows = chunk.rows[:number]
    return replace(chunk, rows=rows, batch=chunk.batch.slice(0, number), end=int(rows[-1]) + 1)


def _with_last(chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, bool]]:
    """Yield (chunk, True if it is the last) for each chunk."""
    before = next(chunks, None)
    for chunk in chunks:
        assert before is not None
        yield before, False
        before = chunk
    if before is not None:
        yield before, True


def write_pieces(followed: Followed, number: int, path: Path) -> None:
    """Write the pieces that were read, up to number ``number``, to a checkpoint's file, as JSON."""
    path.write_text(json.dumps([asdict(piece) for piece in followed.pieces_until(number)]), "utf-8")


def read_pieces(path: Path) -> list[Any]:
    """Return the pieces in a file that :func:`write_pieces` wrote."""
    return [_piece_of(document) for document in json.loads(path.read_text("utf-8"))]


def _piece_of(document: dict[str, Any]) -> Piece:
    return Segment.of_json(document) if "ranges" in document else Taken(**document)
