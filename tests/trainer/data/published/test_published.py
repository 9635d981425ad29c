"""Public data sets, fetched from a server here that stands for their publishers, and converted."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.errors import DataError
from trainer.data.published import download
from trainer.data.published.conversions import _positions
from trainer.data.published.registry import PUBLISHED
from trainer.data.sources.source import Source
from trainer.spec import load_documents

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


def archive_of(**files):
    """A zip archive; a name's double underscore is the slash of its folder."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/").replace("0", "-") + ".dat", text.encode("latin-1"))
    return content.getvalue()


MOVIELENS = archive_of(
    ml01m__ratings="1::1193::5::30\n1::661::3::10\n2::1193::4::7\n1::914::3::10\n",
    ml01m__users="1::F::1::10::04806\n2::M::56::16::70072\n",
    ml01m__movies='661::Café "x" (1995)::Animation|Comedy\n914::It\'s, y (1995)::Drama\n1193::Z (1975)::Drama\n',
)


def epinions_archive():
    content = io.BytesIO()
    ratings = [[1, 7, 3, 5, 2, 978300760], [2, 8, 27, 1, 0, 1305072000]]
    with zipfile.ZipFile(content, "w") as archive:
        lines = "".join("   ".join(f"{number:.7e}" for number in row) + "\n" for row in ratings)
        archive.writestr("epinion_with_rating_timestamp_txt/rating_with_timestamp.txt", lines)
        archive.writestr("epinion_with_rating_timestamp_txt/trust.txt", "   2.0e+000   1.0e+000\n")
    return content.getvalue()


FILES = {
    "ml-1m.zip": MOVIELENS,
    "epinions_with_rating_timestamp_txt.zip": epinions_archive(),
    "beauty.txt": b"1 1\n1 2\n2 1\n1 5\n",
    "Sports_and_Outdoors.txt": b"1 4 5 6\n2 4\n",
    "Sports_and_Outdoors_item2attributes.json": b'{"4": [1, 2], "5": [], "6": [3]}',
    "train.txt": b"0 0 1\n1 2\n2\n",
    "test.txt": b"0 3\n1 0\n",
}
EXPECTED = {
    "ml1m": {
        "user": [1, 1, 2, 1], "item": [1193, 661, 1193, 914], "rating": [5, 3, 4, 3], "pos": [2, 0, 0, 1],
        "timestamp": [30, 10, 7, 10],
    },
    "ml1m_users": {
        "user": [1, 2], "gender": ["F", "M"], "age": [1, 56], "occupation": [10, 16], "zip": ["04806", "70072"]
    },
    "ml1m_movies": {
        "item": [661, 914, 1193], "title": ['Café "x" (1995)', "It's, y (1995)", "Z (1975)"],
        "genres": ["Animation|Comedy", "Drama", "Drama"],
    },
    "epinions": {
        "user": [1, 2], "item": [7, 8], "category": [3, 27], "rating": [5, 1], "timestamp": [978300760, 1305072000]
    },
    "epinions_trust": {"src": [2], "dst": [1]},
    "amazon_beauty": {"user": [1, 1, 2, 1], "item": [1, 2, 1, 5], "pos": [0, 1, 0, 2]},
    "amazon_sports": {"user": [1, 1, 1, 2], "item": [4, 5, 6, 4], "pos": [0, 1, 2, 0]},
    "amazon_sports_attrs": {"item": [4, 5, 6], "attrs": [[1, 2], [], [3]]},
    "gowalla": {
        "user": [0, 0, 1, 0, 1], "item": [0, 1, 2, 3, 0], "is_test": [False, False, False, True, True]
    },
}  # fmt: skip


@pytest.fixture
def publisher(monkeypatch):
    """A server with ``files``, which all sets are fetched from; ``asked`` has the paths that were asked for."""

    class Handler(BaseHTTPRequestHandler):
        files = dict(FILES)
        asked: list[str] = []

        def do_GET(self):
            name = self.path.rpartition("/")[2]
            self.asked.append(name)
            if self.path.startswith("/moved/"):
                self.send_response(302)
                self.send_header("Location", "/" + name)
                self.end_headers()
                return
            content = self.files.get(name)
            self.send_response(404 if content is None else 200)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *arguments):
            pass

    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    for name, data in PUBLISHED.items():
        files = tuple(
            dataclasses.replace(
                file,
                url=f"http://127.0.0.1:{server.server_port}/moved/{file.name}",
                md5=file.md5 and hashlib.md5(FILES[file.name]).hexdigest(),
            )
            for file in data.files
        )
        monkeypatch.setitem(PUBLISHED, name, dataclasses.replace(data, files=files))
    yield Handler
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_fetched_becomes_what_the_examples_read(name, publisher, tmp_path):
    told: list[str] = []
    paths = download.get(name, tmp_path / "data", told=told.append)
    assert {path.stem: pq.read_table(path).to_pydict() for path in paths} == {
        table: EXPECTED[table] for table in PUBLISHED[name].tables
    }
    assert PUBLISHED[name].terms in told[0]
    for file in PUBLISHED[name].files:
        (line,) = [line for line in told if line.startswith(file.name)]
        assert hashlib.sha256(FILES[file.name]).hexdigest() in line
        assert line.endswith("MD5 as its publisher says" if file.md5 else "no published checksum to compare with")
    publisher.asked.clear()
    assert download.get(name, tmp_path / "data", told=told.append) == paths
    assert publisher.asked == []
    assert told[-1].endswith("there already")


def examples_of_published():
    for path in sorted(EXAMPLES.glob("*.yaml")):
        dataset, _ = load_documents(path)
        name = Path(dataset.uri).stem
        if dataset.uri.startswith("data/") and name in PUBLISHED:
            yield pytest.param(dataset, PUBLISHED[name], id=path.stem)


@pytest.mark.parametrize(("dataset", "data"), list(examples_of_published()))
def test_examples_name_columns_that_are_there(dataset, data):
    tables = {Path(dataset.uri).name: _read_by(dataset)}
    for feature in dataset.features.values():
        if feature.join is not None:
            tables[feature.join.uri] = {feature.join.on, feature.join.column}
    for graph in dataset.graphs.values():
        tables[graph.uri] = {graph.source, graph.target}
    for name, columns in tables.items():
        assert columns <= EXPECTED[Path(name).stem].keys()
        assert Path(name).stem in data.tables


def _read_by(dataset):
    direct = {
        feature.column or name for name, feature in dataset.features.items() if not (feature.join or feature.derive)
    }
    return direct | set(dataset.label_columns.values()) | ({dataset.ordering} if dataset.ordering else set())


def test_a_file_of_another_checksum_is_not_used(publisher, tmp_path):
    publisher.files = FILES | {"ml-1m.zip": MOVIELENS + b" "}
    with pytest.raises(DataError, match=r"ml-1m\.zip: has MD5 \w+, and its publisher says \w+ \(try again"):
        download.get("ml1m", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_publisher_that_does_not_give_it(publisher, tmp_path):
    publisher.files = {}
    with pytest.raises(DataError, match=r"train\.txt: cannot be fetched: .*404.*fetch it elsewhere"):
        download.get("gowalla", tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("epinions", {"epinions_with_rating_timestamp_txt.zip": b"<html>moved</html>"}),
        ("gowalla", {"train.txt": b"0 one\n"}),
        ("amazon_sports", {"Sports_and_Outdoors_item2attributes.json": b"[1]"}),
    ],
)
def test_a_file_of_another_form_is_told(name, files, publisher, tmp_path):
    publisher.files = FILES | files
    with pytest.raises(DataError, match=r"does not have the expected form: .*has another version now"):
        download.get(name, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_files_that_were_fetched_elsewhere(publisher, tmp_path):
    (tmp_path / "train.txt").write_bytes(FILES["train.txt"])
    with pytest.raises(DataError, match=r"test\.txt: is not there \(fetch http://.*test\.txt into this folder"):
        download.get("gowalla", tmp_path / "data", tmp_path)
    (tmp_path / "test.txt").write_bytes(FILES["test.txt"])
    (path,) = download.get("gowalla", tmp_path / "data", tmp_path)
    assert publisher.asked == []
    assert len(list(Source(str(path)).stream(["user", "is_test"]))) == 1


def test_a_name_that_nobody_publishes(tmp_path):
    with pytest.raises(DataError, match=r"douban: is no data set that can be fetched .there are amazon_beauty, amazon"):
        download.get("douban", tmp_path)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4))))
def test_positions_are_those_of_a_plain_loop(rows):
    positions = _positions(*(np.array([row[side] for row in rows], dtype=np.int64) for side in (0, 1))).to_pylist()
    for number, (user, time) in enumerate(rows):
        before = [(t, n) for n, (u, t) in enumerate(rows) if u == user and (t, n) < (time, number)]
        assert positions[number] == len(before)


@pytest.mark.data
def test_positions_are_those_of_the_real_ratings(real_data):
    ratings = pq.read_table(real_data / "ml1m.parquet", columns=["user", "timestamp", "pos"])
    ratings = ratings.filter(ratings["timestamp"].is_valid())
    found = _positions(*(ratings[name].to_numpy().astype(np.int64) for name in ("user", "timestamp")))
    assert np.array_equal(found.to_numpy(), ratings["pos"].to_numpy())
