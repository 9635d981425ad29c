"""Publishers' files as tables of rows, a function for each data set. Torch-free; a set is held in memory."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

Downloads = Mapping[str, Path]
"""The publisher's files, keyed by name."""
Tables = Mapping[str, pa.Table]
"""The tables, by the name of the Parquet file without its ending."""
Conversion = Callable[[Downloads], Tables]


def movielens_1m(files: Downloads) -> Tables:
    """Return ratings with their rank ``pos`` in the user's order of time, users, and movies.

    Ratings of the same second keep the order of the file.
    """
    with zipfile.ZipFile(files["ml-1m.zip"]) as archive:
        ratings = _double_colons(archive.read("ml-1m/ratings.dat"), ["user", "item", "rating", "timestamp"])
        users = _double_colons(archive.read("ml-1m/users.dat"), ["user", "gender", "age", "occupation", "zip"])
        movies = _double_colons(archive.read("ml-1m/movies.dat"), ["item", "title", "genres"])
    ratings = ratings.add_column(3, "pos", _positions(_numbers(ratings, "user"), _numbers(ratings, "timestamp")))
    return {"ml1m": ratings, "ml1m_users": users, "ml1m_movies": movies}


def epinions(files: Downloads) -> Tables:
    """Return ratings (user, item, category, rating, timestamp) in the order of the file, and who trusts whom."""
    with zipfile.ZipFile(files["epinions_with_rating_timestamp_txt.zip"]) as archive:
        ratings = _numbers_of(archive, "rating_with_timestamp.txt")
        trust = _numbers_of(archive, "trust.txt")
    columns = {"user": 0, "item": 1, "category": 2, "rating": 3, "timestamp": 5}
    return {
        "epinions": pa.table({name: ratings[:, number] for name, number in columns.items()}),
        "epinions_trust": pa.table({"src": trust[:, 0], "dst": trust[:, 1]}),
    }


def amazon_beauty(files: Downloads) -> Tables:
    """Return user, item and ``pos``, from lines of a user and an item in the user's order."""
    pairs = np.loadtxt(files["beauty.txt"], dtype=np.int64, ndmin=2)
    return {"amazon_beauty": _sequences(pairs[:, 0], pairs[:, 1])}


def amazon_sports(files: Downloads) -> Tables:
    """Return user, item and ``pos``, and the attributes of each item."""
    users, items = _users_with_items(files["Sports_and_Outdoors.txt"])
    attributes = json.loads(files["Sports_and_Outdoors_item2attributes.json"].read_text("utf-8"))
    attrs = pa.array(list(attributes.values()), pa.list_(pa.int64()))
    return {
        "amazon_sports": _sequences(users, items),
        "amazon_sports_attrs": pa.table({"item": [int(item) for item in attributes], "attrs": attrs}),
    }


def gowalla(files: Downloads) -> Tables:
    """Return user, item and ``is_test``, the publisher's split."""
    train, test = (_users_with_items(files[name]) for name in ("train.txt", "test.txt"))
    users, items = (np.concatenate([first, second]) for first, second in zip(train, test, strict=True))
    is_test = np.arange(len(users)) >= len(train[0])
    return {"gowalla": pa.table({"user": users, "item": items, "is_test": is_test})}


def _double_colons(content: bytes, names: list[str]) -> pa.Table:
    """Parse fields separated by ``::``, which is too long for readers of one-character separators."""
    text = content.decode("latin-1").replace("::", "\t").encode()
    return pa.csv.read_csv(
        io.BytesIO(text),
        pa.csv.ReadOptions(column_names=names),
        pa.csv.ParseOptions(delimiter="\t", quote_char=False),
        pa.csv.ConvertOptions(column_types={"zip": pa.string()}),
    )


def _numbers(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    return table[column].to_numpy()


def _numbers_of(archive: zipfile.ZipFile, name: str) -> npt.NDArray[np.int64]:
    """Return the rows of a file in the archive, in any folder; MATLAB writes integers as ``1.0e+00``."""
    (member,) = [one for one in archive.namelist() if one.rpartition("/")[2] == name]
    with archive.open(member) as file:
        return np.loadtxt(file, ndmin=2).astype(np.int64)


def _users_with_items(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return user and item of each pair, from lines of a user and all its items."""

    def lines() -> Iterator[npt.NDArray[np.int64]]:
        with open(path, encoding="utf-8") as file:
            for line in file:
                yield np.array(line.split(), dtype=np.int64)

    found = [line for line in lines() if len(line)]
    users = np.repeat([line[0] for line in found], [len(line) - 1 for line in found])
    return users.astype(np.int64), np.concatenate([np.empty(0, np.int64), *(line[1:] for line in found)])


def _sequences(users: npt.NDArray[np.int64], items: npt.NDArray[np.int64]) -> pa.Table:
    return pa.table({"user": users, "item": items, "pos": _positions(users, np.arange(len(users)))})


def _positions(users: npt.NDArray[np.int64], times: npt.NDArray[np.int64]) -> pa.ChunkedArray:
    """Return the rank of each row among those of its user by time, from 0; equal times by row."""
    order = np.lexsort((times, users))
    in_order = users[order]
    starts = np.flatnonzero(np.append(True, in_order[1:] != in_order[:-1])) if len(users) else np.empty(0, np.int64)
    lengths = np.diff(np.append(starts, len(users)))
    positions = np.empty(len(users), np.int64)
    positions[order] = np.arange(len(users)) - np.repeat(starts, lengths)
    return pa.chunked_array([positions])
