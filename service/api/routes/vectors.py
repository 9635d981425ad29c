"""Routes that fetch vectors by id, as an Arrow stream or JSON, from a view or a collection's default view.

The routes read only the feature store's memory-mapped files; API keys are looked up in a bounded cache. The body is
parsed by hand and the response written by Arrow or orjson, because a response model would take longer than everything
else together.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from embeddings.rff.registry import feature_map
from embeddings.store import Collection, default_view
from embeddings.store.manifest import VersionManifest
from embeddings.vectors.item_vectors import MISSING, STATUS_NAMES, Array
from service.api.routes.collections import CollectionName, existing
from service.core import errors
from service.core.inline_io import InlineIO
from service.core.tenants import qualified
from service.features.store_access import accepted, ids_as, in_store, rereading, store_of, store_problems, unchanged
from service.identity.auth import require
from trainer.spec.problems import FieldProblem

router = APIRouter(prefix="/v1", tags=["vectors"], dependencies=[Depends(require("features:read"))])

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
FORMATS = {ARROW: "arrow", JSON: "json"}
MAX_IDS = 10_000
MAX_VALUES = {ARROW: 2**26, JSON: 2**24}
"""Most numbers in a response, by media type; ten thousand vectors of usual dimensions need far fewer."""
BRIEF_VALUES = {ARROW: 2**15, JSON: 2**13}
BRIEF_PRODUCTS = 2**22
"""Limits up to which a response takes at most a millisecond: numbers in it, and multiplications to compute it."""
DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}

_DOCUMENTED: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["ids"],
                    "additionalProperties": False,
                    "properties": {
                        "ids": {
                            "type": "array",
                            "maxItems": MAX_IDS,
                            "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                        },
                        "version": {"type": "string", "default": "current"},
                        "dtype": {"enum": list(DTYPES), "default": "float32"},
                    },
                }
            }
        },
    }
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Vectors in request order, duplicates kept.", "content": {ARROW: {}, JSON: {}}},
    **errors.also(304, "The client already has this response: If-None-Match contains its ETag."),
    **errors.responses(404, 406),
}

_STATUSES = pa.array(list(STATUS_NAMES))


class VectorQuery(NamedTuple):
    """The fields of a request's body."""

    ids: list[Any]
    version: str
    dtype: str


class Fetched(NamedTuple):
    """The data to send: ids in the collection's type, status uint8 [n], vectors [n, dim] (zero for missing ids)."""

    id_type: str
    ids: list[Any]
    status: Array
    vectors: Array


@router.post("/collections/{collection}/vectors", openapi_extra=_DOCUMENTED, responses=_ANSWERS)
async def of_collection(request: Request, collection: CollectionName) -> Response:
    """Return vectors for the ids in the body from a collection's default view."""
    return await _fetch(request, default_view(collection), collection)


@router.post("/views/{name}/vectors", openapi_extra=_DOCUMENTED, responses=_ANSWERS)
async def of_view(request: Request, name: str) -> Response:
    """Return vectors for the ids in the body from a view; an identity view returns the published vectors unchanged.

    `VIEW@gN` is the view in anchor generation N, and `COLLECTION@gN` has the vectors of generation N themselves.
    Vectors of a later generation are mapped to generation N; if no map is served, 404 says why.
    """
    return await _fetch(request, name, None)


async def _fetch(request: Request, view: str, collection: str | None) -> Response:
    media_type = accepted(request.headers.get("accept"), (JSON, ARROW))
    body = await request.body()
    query = parse(body)
    metrics = request.app.state.metrics

    def answer() -> Response:
        started = time.perf_counter()
        store = store_of(request)
        target = store.collection(collection) if collection is not None else store.view_collection(view)
        with target.snapshot_read():
            if collection is not None:
                existing(request, collection)
            return rereading(target, lambda: of(target, started))

    def of(target: Collection, started: float) -> Response:
        reader = target.open(query.version)
        # Everything below reads this version, even if another one becomes current meanwhile.
        entry = target.view(view, reader.version)
        etag = etag_of(body, media_type, reader.manifest, entry)
        headers = {"Evenkeel-Version": reader.version, "ETag": etag, "Vary": "Accept"}
        if unchanged(request, etag):
            return Response(status_code=304, headers=headers)
        check_size(len(query.ids), entry["dim"], media_type)
        ids = ids_as(reader.manifest.id_type, query.ids)
        status, vectors = target.view_lookup(view, ids, reader.version)
        with np.errstate(over="ignore"):
            vectors = vectors.astype(DTYPES[query.dtype], copy=False)
        fetched = Fetched(reader.manifest.id_type, ids, status, vectors)
        encode = arrow_stream if media_type == ARROW else json_body
        shown = qualified(request.state.principal.tenant, target.name)
        encoded = encode(fetched, reader.version, view)
        metrics.fetched_ids.labels(shown).observe(len(ids))
        metrics.fetch_seconds.labels(shown, FORMATS[media_type]).observe(time.perf_counter() - started)
        return Response(encoded, headers=headers, media_type=media_type)

    inline_io: InlineIO = request.app.state.inline_io
    if inline_io.allowed() and is_brief(request, view, collection, query, media_type):
        with store_problems():
            return inline_io.call(answer)
    return await in_store(answer)


def is_brief(request: Request, view: str, collection: str | None, query: VectorQuery, media_type: str) -> bool:
    """Return True if the response takes at most a millisecond: few rows, and no file to open or check."""
    with contextlib.suppress(ValueError):  # the code that builds the response raises the same error and reports it
        store = store_of(request)
        target = store.collection(collection) if collection is not None else store.seen_view_collection(view)
        entry = None if target is None else target.cached_view(view, query.version)
        if entry is not None:
            products = entry["dim_in"] * entry["dim"] if feature_map(entry["kind"]).computes else 0
            if "map" in entry:
                products += entry["map"]["dim_in"] * entry["map"]["dim"]
            in_all = len(query.ids) * entry["dim"]
            return in_all <= BRIEF_VALUES[media_type] and len(query.ids) * products <= BRIEF_PRODUCTS
    return False


def parse(body: bytes) -> VectorQuery:
    """Parse the fields of the body.

    Raises:
        Problem: 422 that names the invalid field.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise errors.invalid(FieldProblem("", f"the body is not JSON: {error}")) from None
    if not isinstance(document, dict):
        raise errors.invalid(FieldProblem("", 'the body is an object such as {"ids": [1, 2]}'))
    unknown = [name for name in document if name not in VectorQuery._fields]
    problems = [FieldProblem(name, "no such field", "check the spelling") for name in unknown[: errors.MAX_PROBLEMS]]
    ids, version, dtype = document.get("ids"), document.get("version", "current"), document.get("dtype", "float32")
    if not isinstance(ids, list):
        ids = []
        problems.append(FieldProblem("ids", "give a list of ids"))
    elif len(ids) > MAX_IDS:
        problems.append(
            FieldProblem(
                "ids", f"{len(ids)} ids are too many: at most {MAX_IDS} in one request", "send several requests"
            )
        )
    if not isinstance(version, str):
        problems.append(FieldProblem("version", "give the name of a version, or current"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        problems.append(FieldProblem("dtype", f"is not one of {', '.join(DTYPES)}"))
    if problems:
        raise errors.invalid(*problems, num_more=max(len(unknown) - errors.MAX_PROBLEMS, 0))
    return VectorQuery(ids, version, dtype)


def check_size(num_ids: int, dim: int, media_type: str) -> None:
    """Check that the response is not too large.

    Raises:
        Problem: 422 for a response that would use too much memory (Arrow) or delay other requests too long (JSON).
    """
    at_most = MAX_VALUES[media_type] // dim
    if num_ids > at_most:
        instead = ", or ask for Arrow" if media_type == JSON else ""
        message = f"{num_ids} vectors of {dim} numbers are too many for one answer"
        raise errors.invalid(FieldProblem("ids", message, f"send at most {at_most} ids at once{instead}"))


def etag_of(body: bytes, media_type: str, manifest: VersionManifest, entry: dict[str, Any]) -> str:
    """Return the ETag of a response, which is determined by the request's body, media type, version and view."""
    served = (
        media_type,
        manifest.collection,
        manifest.version,
        manifest.created_at,
        entry["name"],
        # A feature map without a matrix has no hash: only the time tells it from an earlier view of the same name.
        entry["sha256"] or entry["created_at"],
        len(manifest.erasures),
    )
    digest = hashlib.blake2b(orjson.dumps(served), digest_size=16)
    digest.update(body)
    return f'"{digest.hexdigest()}"'


def arrow_stream(fetched: Fetched, version: str, view: str) -> bytes:
    """Return an Arrow IPC stream of one record batch: id, status, vector (null where missing)."""
    missing = fetched.status == MISSING
    schema = _schema(fetched.id_type, fetched.vectors.dtype, fetched.vectors.shape[1], version, view)
    flat = pa.array(fetched.vectors.reshape(-1))
    mask = pa.array(missing) if missing.any() else None
    columns = [
        pa.array(fetched.ids, schema.field("id").type),
        pa.DictionaryArray.from_arrays(pa.array(fetched.status, pa.int8()), _STATUSES),
        pa.FixedSizeListArray.from_arrays(flat, fetched.vectors.shape[1], mask=mask),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return sink.getvalue().to_pybytes()


@functools.lru_cache(256)
def _schema(id_type: str, dtype: np.dtype[Any], dim: int, version: str, view: str) -> pa.Schema:
    """Return the Arrow schema of the stream, cached because creating it takes as long as creating all columns."""
    fields = [
        ("id", pa.int64() if id_type == "int64" else pa.string()),
        ("status", pa.dictionary(pa.int8(), pa.string())),
        ("vector", pa.list_(pa.from_numpy_dtype(dtype), dim)),
    ]
    return pa.schema(fields, metadata={"version": version, "view": view})


def json_body(fetched: Fetched, version: str, view: str) -> bytes:
    """Return the content of :func:`arrow_stream` as JSON; the vector of a missing id is null."""
    items = [
        {"id": identifier, "status": STATUS_NAMES[status], "vector": vector if status != MISSING else None}
        for identifier, status, vector in zip(fetched.ids, fetched.status.tolist(), fetched.vectors, strict=True)
    ]
    document = {"version": version, "view": view, "dim": fetched.vectors.shape[1], "items": items}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
