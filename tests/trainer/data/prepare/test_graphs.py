"""Graphs of a dataset: edges of raw ids become rows of the table, whatever their types; what is wrong is named."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.batches.prepared import PreparedData
from trainer.data.errors import DataError
from trainer.data.prepare.plan import make_plan
from trainer.data.prepare.preparation import dataset_fingerprint, prepare

SSE = {"user": {"graph": "trust", "rho": 10}}
# Raw users are 3, 10, 17, ...; 4 is none of them.
EDGES = [(3, 10), (10, 3), (3, 17), (17, 17), (3, 4), (None, 10), (24, 10), (4, 4)]


@pytest.fixture
def graph_spec(tmp_path, dataset_spec, clicks):
    """``graph_spec(pairs, **fields of the graph)``: a dataset whose graph ``trust`` is in a file of these pairs."""

    def make(edges=EDGES, **fields):
        if edges is not None:
            table = edges if isinstance(edges, pa.Table) else columns(edges)
            pq.write_table(table, tmp_path / "trust.parquet")
        graph = {"uri": "trust.parquet", "source": "src", "target": "dst", "of": "user"} | fields
        return dataset_spec(clicks(), graphs={"trust": graph})

    return make


def columns(edges, type_=None):
    return pa.table({name: pa.array([edge[i] for edge in edges], type_) for i, name in enumerate(("src", "dst"))})


def raw_edges(data: PreparedData, name="trust"):
    """The graph's entries as pairs of raw ids."""
    graph = data.graph(name)
    ids = [None, None, *data.vocabulary(data.graphs[name]["table"]).to_pylist()]
    rows = np.repeat(np.arange(graph.num_rows), graph.degrees)
    return [(ids[row], ids[other]) for row, other in zip(rows.tolist(), graph.neighbours.tolist(), strict=True)]


@pytest.mark.parametrize("type_", [pa.int16(), pa.int64(), pa.float64(), pa.string()])
def test_edges_become_rows_and_unknown_ids_are_counted(graph_spec, job_spec, tmp_path, type_):
    edges = [
        tuple(str(end) if end is not None and pa.types.is_string(type_) else end for end in edge) for edge in EDGES
    ]
    log = []
    data = prepare(graph_spec(columns(edges, type_)), job_spec(sse=SSE), tmp_path / "out", log=log.append)
    assert raw_edges(data) == [(3, 10), (3, 17), (10, 3), (10, 24), (17, 3), (24, 10)]
    assert data.graph("trust").num_rows == data.tables["user"].num_rows
    assert data.graphs == {"trust": {"table": "user", "edges": 8, "unknown": 3, "entries": 6}}
    said = "graph trust: 8 edges, 3 left out because training lacks one of their ids; 4 of 30 rows of user have"
    assert any(line.startswith(said) for line in log)


def test_graphs_are_read_for_the_jobs_that_name_them(graph_spec, job_spec, tmp_path):
    """Neither the file nor its columns are looked at for others; a job that begins to is prepared anew."""
    dataset = graph_spec(None)
    plain = prepare(dataset, job_spec(sse={"user": {"graph": "trust", "probability": 0}}), tmp_path / "out")
    assert plain.graphs == {}
    with pytest.raises(DataError, match=r"out: no graph 'trust' was prepared \(there are none\)"):
        plain.graph("trust")
    graph_spec()
    log = []
    assert len(raw_edges(prepare(dataset, job_spec(sse=SSE), tmp_path / "out", log=log.append))) == 6
    prepare(dataset, job_spec(sse=SSE), tmp_path / "out", log=log.append)
    assert log[-1].startswith("prepared data reused")
    before = dataset_fingerprint(make_plan(dataset, job_spec(sse=SSE)))
    graph_spec(EDGES[:4])
    assert dataset_fingerprint(make_plan(dataset, job_spec(sse=SSE))) != before
    assert len(raw_edges(prepare(dataset, job_spec(sse=SSE), tmp_path / "out"))) == 4


def test_a_graph_of_a_shared_table_from_csv(clicks, dataset_spec, job_spec, tmp_path):
    """Items by a history's name: two features read it."""
    items = np.unique(clicks()["item"].to_numpy())
    pairs = [(int(a), int(b)) for a, b in itertools.pairwise(items)]
    text = "a,b\n" + "".join(f"{a},{b}\n" for a, b in pairs)
    (tmp_path / "alike.csv").write_text(text)
    history = {"previous": "item", "by": "user", "order": "ts", "length": 3}
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    features["history"] = {"type": "id_list", "derive": history, "shares": "item"}
    graphs = {"alike": {"uri": "alike.csv", "source": "a", "target": "b", "of": "history"}}
    dataset = dataset_spec(clicks(), features=features, graphs=graphs)
    split = {"split": {"kind": "random", "validation": 0, "test": 0}}
    sse = {name: {"graph": "alike", "rho": 3} for name in ("item", "history")}
    data = prepare(dataset, job_spec(sse=sse, evaluation=split), tmp_path / "out")
    assert sorted(raw_edges(data, "alike")) == sorted([*pairs, *((b, a) for a, b in pairs)])


@pytest.mark.parametrize(
    ("edges", "fields", "message"),
    [
        (None, {}, r"trust\.parquet: there is no such file .*correct uri"),
        (EDGES, {"source": "from"}, r"trust\.parquet: no column 'from' \(there are dst, src\)"),
        (EDGES, {"target": "to"}, r"no column 'to'"),
        (columns([("a", "b")]), {}, r"trust\.parquet, column 'src': has an id that is no 64-bit integer"),
        (columns([([1], [2])]), {}, r"column 'src': holds list.*ids are integers or strings"),
        ([(4, 3), (5, 10)], {}, r"columns 'src' and 'dst': none of its 2 edges joins two ids of table 'user'"),
        ([(3, 3)], {}, r"none of its 1 edges joins .*check source, target and of in graphs\.trust"),
        (columns([], pa.int64()), {}, r"none of its 0 edges"),
    ],
)
def test_bad_graphs_are_named_with_their_place(graph_spec, job_spec, tmp_path, edges, fields, message):
    with pytest.raises(DataError, match=message):
        prepare(graph_spec(edges, **fields), job_spec(sse=SSE), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_warm_start_finds_the_ids_of_its_parent(graph_spec, job_spec, tmp_path, dataset_spec, clicks):
    """Rows move as the vocabulary grows; the graph follows."""
    first = prepare(graph_spec(), job_spec(sse=SSE), tmp_path / "first")
    base = {"user": first.id_map("user")}
    dataset = graph_spec()
    rows = clicks(200, seed=1, users=40)
    pq.write_table(rows, tmp_path / "rows.parquet")
    second = prepare(dataset, job_spec(sse=SSE), tmp_path / "second", base_vocabulary=base)
    assert sorted(raw_edges(second)) == sorted(raw_edges(first))
    assert second.graph("trust").num_rows > first.graph("trust").num_rows
