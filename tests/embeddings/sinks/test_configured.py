"""The operator's file of sinks: what is read from it, and that no message shows a password."""

from __future__ import annotations

from pathlib import Path

import pytest

from embeddings.sinks import registry
from embeddings.sinks.base import SinkError
from embeddings.sinks.configured import read_sinks
from embeddings.sinks.postgresql import PostgreSQLSink


def test_sinks_have_a_name_a_tenant_and_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setitem(registry.SINKS, "test", opened.append)
    monkeypatch.setenv("PASSWORD", "a/b@c")
    monkeypatch.setenv("WHOLE", "test://whole/url")
    file = tmp_path / "sinks.yaml"
    file.write_text("one: {url: 'test://me:${PASSWORD}@host/db', tenant: shop}\ntwo: {url: '${WHOLE}'}\n")
    sinks = read_sinks(file)
    assert {name: sink.tenant for name, sink in sinks.items()} == {"one": "shop", "two": "default"}
    for sink in sinks.values():
        sink.open()
    assert opened == ["test://me:a%2Fb%40c@host/db", "test://whole/url"]
    assert "PASSWORD" not in repr(sinks)
    assert read_sinks(None) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a list", "write NAME: {url: URL}"),
        ("One: {url: 'test://secret'}", "sink 'One': name it by"),
        ("one: {uri: 'test://secret'}", "sink 'one': has no url"),
        ("one: {url: 'test://secret', owner: me}", "owner: no such field"),
        ("one: {url: 'test://secret'", "is no YAML, line"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_the_entry(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "sinks.yaml"
    file.write_text(text)
    with pytest.raises(SinkError) as refused:
        read_sinks(file)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("test://me:${NO_SUCH_VARIABLE}@secret", "its url names NO_SUCH_VARIABLE"),
        ("mysql://me:secret@host/db", "'mysql' is no scheme of a sink's URL: use postgresql://HOST:PORT/DATABASE"),
        ("postgresql://me:secret@host/db?index=ivf", "index=ivf: use none or hnsw"),
    ],
)
def test_an_address_that_is_wrong_is_refused_by_the_name(tmp_path: Path, url: str, says: str) -> None:
    file = tmp_path / "sinks.yaml"
    file.write_text(f"one: {{url: '{url}'}}")
    with pytest.raises(SinkError) as refused:
        read_sinks(file)["one"].open()
    assert str(refused.value).startswith(f"sink 'one': {says}")
    assert "secret" not in str(refused.value)


def test_a_file_that_is_missing_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match=r"EVENKEEL_SINKS: .*none.yaml cannot be read"):
        read_sinks(tmp_path / "none.yaml")


def test_options_of_ours_do_not_reach_the_server() -> None:
    sink = PostgreSQLSink("postgresql://me@host/db?schema=s&index=hnsw&sslmode=require")
    assert sink._url == "postgresql://me@host/db?sslmode=require"
