"""Check that a checkpoint's shards together hold every element of every table exactly once. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def check_cover(shards: Sequence[Mapping[str, Any]]) -> None:
    """Check that the pieces hold every element of every table exactly once. ``shards`` are manifest entries.

    Raises:
        ValueError: an element is missing or held twice; the caller's sharding plan is wrong.
    """
    pieces: dict[str, list[Mapping[str, Any]]] = {}
    for shard in shards:
        pieces.setdefault(shard["table"], []).append(shard)
    for table, held in pieces.items():
        if len({(shard["num_rows"], shard["dim"]) for shard in held}) > 1:
            raise ValueError(f"table '{table}': ranks disagree about its size")
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for number, piece in enumerate(held):
            if piece["row_count"]:
                starts.setdefault(piece["row_start"], []).append(number)
                ends.setdefault(piece["row_start"] + piece["row_count"], []).append(number)
        num_rows, dim = held[0]["num_rows"], held[0]["dim"]
        # Go through the rows with the pieces that hold them: between two edges the pieces must make up all columns.
        active: dict[int, Mapping[str, Any]] = {}
        edges = sorted({0, num_rows, *starts, *ends})
        if edges[0] < 0 or edges[-1] > num_rows:
            raise ValueError(f"table '{table}': ranks hold rows [{edges[0]}, {edges[-1]}) of {num_rows}")
        for edge in edges[:-1]:
            for number in ends.get(edge, []):
                del active[number]
            active |= {number: held[number] for number in starts.get(edge, [])}
            column = 0
            for piece in sorted(active.values(), key=lambda piece: piece["column_start"]):
                if piece["column_start"] < column:
                    raise ValueError(f"table '{table}': rows from {edge} are held twice")
                if piece["column_start"] > column:
                    break
                column += piece["column_count"]
            if column != dim:
                what = f"columns from {column} of rows" if column else "rows"
                raise ValueError(f"table '{table}': {what} from {edge} are held nowhere")
