"""A version for Feast: a Parquet source and a feature repository, written without Feast.

    FOLDER/feature_store.yaml   project, local provider, SQLite online store; users edit it
           features.py          entity, source, feature view; collection and version in its tags
           data/items.parquet   the join key, event_timestamp, status, vector

Feast's dependencies clash with this package's, so it is installed in another environment and reads this folder, as
docs/guides/store.md shows. The source is replaced first and the definitions after it, each in one step: a reader in
between sees the new rows with the old tags.
"""

from __future__ import annotations

import argparse
import keyword
import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.durable_files import appearing, write_file
from embeddings.store.backend_registry import open_store
from embeddings.store.collection.collection import Collection
from embeddings.store.version import VersionReader
from embeddings.vectors.half_precision import as_float32
from embeddings.vectors.item_vectors import STATUS_NAMES, arrow_of, chunks

SOURCE_ROWS = 65_536

_SETTINGS = """\
project: {project}
registry: data/registry.db
provider: local
online_store:
  type: sqlite
  path: data/online_store.db
entity_key_serialization_version: 3
"""

_DEFINITIONS = '''\
"""Version {version} of the collection {collection}, written by Evenkeel: export again instead of editing."""

from datetime import timedelta

from feast import Entity, FeatureView, Field, FileSource, ValueType
from feast.types import Array, Float32, String

{entity} = Entity(name={entity!r}, join_keys=[{entity!r}], value_type=ValueType.{id_type})

{name}_source = FileSource(
    name={source!r},
    path="data/items.parquet",
    timestamp_field="event_timestamp",
)

{name} = FeatureView(
    name={name!r},
    entities=[{entity}],
    ttl=timedelta(seconds={ttl_seconds!r}),
    schema=[
        Field(name="vector", dtype=Array(Float32)),
        Field(name="status", dtype=String),
    ],
    source={name}_source,
    online=True,
    tags={tags!r},
)
'''


def export_feast(
    collection: Collection,
    folder: Path | str,
    *,
    version: str = "current",
    view: str | None = None,
    entity: str = "item",
    ttl_seconds: float = 0.0,
) -> str:
    """Write or rewrite the feature repository ``folder``, and return the exported version.

    An existing feature_store.yaml is left as it is. With ``view`` the view's features are exported in the place of
    vectors. ``entity`` is the join key, a Python name, and ``ttl_seconds`` the time for which a row is valid for Feast;
    0: for ever. Every row has the present time: Feast materializes rows between two times, so a version that is served
    again needs a new one.

    Raises:
        UnknownVersion: there is no such version.
        UnknownView: there is no such view.
        ValueError: an entity that is not a Python name or is the feature view's name, or a negative ttl.
    """
    taken = entity in ("vector", "status", "event_timestamp") or keyword.iskeyword(entity)
    if not entity.isidentifier() or taken:
        raise ValueError(f"entity {entity!r}: take a name that Python can have, such as item")
    if ttl_seconds < 0:
        raise ValueError(f"ttl_seconds is {ttl_seconds}: take 0 for rows that are valid for ever")
    folder = Path(folder)
    reader = collection.open(version)
    name = _feast_name(collection.name if view is None else view)
    if name == entity:
        raise ValueError(f"entity {entity!r} is the feature view's name too: take another with entity=")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    with appearing(folder / "data" / "items.parquet", durable=False) as path:
        _write_source(path, collection, reader, view, entity)
    manifest = reader.manifest
    tags = {
        "evenkeel_collection": collection.name,
        "evenkeel_version": reader.version,
        "evenkeel_anchor_generation": str(manifest.anchor_generation),
        **({} if view is None else {"evenkeel_view": view}),
    }
    definitions = _DEFINITIONS.format(
        version=reader.version, collection=collection.name, entity=entity, name=name, source=f"{name}_source",
        id_type="INT64" if manifest.id_type == "int64" else "STRING", ttl_seconds=float(ttl_seconds), tags=tags,
    )  # fmt: skip
    write_file(folder / "features.py", definitions.encode())
    settings = folder / "feature_store.yaml"
    if not settings.exists():
        write_file(settings, _SETTINGS.format(project=_feast_name(collection.name)).encode())
    return reader.version


def _feast_name(name: str) -> str:
    """Return a collection's or view's name in a form that Feast and Python accept."""
    name = re.sub(r"[^a-z0-9_]", "_", name)
    return name if name[0].isalpha() and not keyword.iskeyword(name) else f"_{name}"


def _write_source(path: Path, collection: Collection, reader: VersionReader, view: str | None, entity: str) -> None:
    moment = pa.scalar(datetime.now(UTC), pa.timestamp("us", tz="UTC"))
    names = pa.array(STATUS_NAMES)
    schema = pa.schema(
        {
            entity: pa.int64() if reader.manifest.id_type == "int64" else pa.string(),
            "event_timestamp": moment.type,
            "status": names.type,
            # Feast supports lists, but not fixed-size lists.
            "vector": pa.list_(pa.float32()),
        }
    )
    with pq.ParquetWriter(path, schema) as writer:
        for part in chunks(len(reader), SOURCE_ROWS):
            vectors = as_float32(reader.vectors[part])
            if view is not None:
                vectors = collection.view_transform(view, vectors, reader.version)
            num_rows, dim = vectors.shape
            offsets = pa.array(range(0, (num_rows + 1) * dim, dim), pa.int32())
            columns = [
                arrow_of(reader.keys[part]),
                pa.repeat(moment, num_rows),
                names.take(pa.array(reader.statuses[part])),
                pa.ListArray.from_arrays(offsets, pa.array(vectors.reshape(-1))),
            ]
            writer.write_table(pa.table(columns, schema=schema))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("collection")
    parser.add_argument("folder", type=Path)
    home = os.environ.get("EVENKEEL_HOME", ".evenkeel")
    parser.add_argument("--store", default=os.environ.get("EVENKEEL_STORE_URL", str(Path(home, "store"))))
    parser.add_argument("--version", default="current")
    parser.add_argument("--view", help="a view: export its features instead of the item vectors")
    parser.add_argument("--entity", default="item", help="join key of the entity")
    parser.add_argument("--ttl-seconds", type=float, default=0.0, help="how long a row is valid; 0: for ever")
    options = parser.parse_args()
    exported = export_feast(
        open_store(options.store).collection(options.collection), options.folder, version=options.version,
        view=options.view, entity=options.entity, ttl_seconds=options.ttl_seconds,
    )  # fmt: skip
    print(f"{options.folder}: version {exported} of '{options.collection}'")


if __name__ == "__main__":
    main()
