"""Spans of rows: the parts in which several hosts read a source. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from trainer.data.sources.source import Source

SPAN_ROWS = 1 << 20
"""Rows of a span at most, where files can be cut: work of some seconds, which is what the loss of a host costs."""
_ALL = 1 << 62


class Span(NamedTuple):
    """Rows from (file, row) ``start`` to before (file, row) ``stop``, by the numbers of files and of their rows."""

    start: tuple[int, int]
    stop: tuple[int, int]


def cut_spans(source: Source, span_rows: int) -> list[Span]:
    """Return spans that hold all rows, in their order.

    A file whose rows before others can be passed over unread is cut after each ``span_rows``; small files share a span.
    Chunks of the source, where their size divides ``span_rows``, are the same as in one stream.
    """
    spans: list[Span] = []
    size = span_rows
    for number, file in enumerate(source.files):
        count = source.reader.rows_in(file.path)
        if count is None:
            # How many rows it has is known once they are read.
            spans.append(Span((number, 0), (number, _ALL)))
            size = span_rows
            continue
        step = span_rows if source.reader.passes_over_rows(file.path) else max(count, 1)
        for row in range(0, count, step):
            end = min(row + step, count)
            if spans and size + end - row <= span_rows:
                spans[-1] = spans[-1]._replace(stop=(number, end))
                size += end - row
            else:
                spans.append(Span((number, row), (number, end)))
                size = end - row
    return spans
