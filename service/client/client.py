"""Python client of the service: plain HTTP calls that return dictionaries as in the REST interface, vectors as numpy.

Only httpx is imported until vectors are requested.
"""

from __future__ import annotations

import codecs
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from service.client.http import Json, ProblemError, ServiceError, Session, Unreachable, default_key, home, once

if TYPE_CHECKING:
    import pyarrow as pa

    from service.client.vectors import As, Vectors

__all__ = ["Client", "ProblemError", "ServiceError", "Unreachable", "default_key", "home"]

TERMINAL_STATES = ("succeeded", "failed", "cancelled")
ARROW_STREAM = "application/vnd.apache.arrow.stream"
MAX_IDS = 10_000
"""In one request."""


class Client(Session):
    """A session with one service. Thread-safe as httpx.Client is; close it, or use it as a context manager.

    Every method raises :class:`ProblemError` for an error response and :class:`Unreachable` if there is no response.
    Requests that start, repeat, fire or promote something are sent with an Idempotency-Key, and sent again if the
    response is lost: the action happens once.

    Example:
        >>> from service.client import Client
        >>> with Client() as client:  # EVENKEEL_URL and EVENKEEL_API_KEY, else the key in $EVENKEEL_HOME/admin.key
        ...     got = client.vectors("items", [10, 30, 10])
        ...     version = client.version("items")["version"]
        >>> got.vectors.shape, got.version == version  # rows in the order asked for
        ((3, 32), True)
        >>> got.vectors[got.found].dtype  # leaves out missing ones, which are NaN
        dtype('float32')
    """

    # --- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, job: Any, *, idempotency_key: str | None = None) -> Json:
        """Submit a JobSpec (or a mapping of one) and return the job; the same key again returns the same job."""
        return self.json("POST", "/jobs", json=_plain(job), headers=once(idempotency_key))

    def estimate(self, job: Any) -> Json:
        """Validate a job without running it and return the service's prediction of memory and time (``dry_run``)."""
        return self.json("POST", "/jobs", json=_plain(job), params={"dry_run": "true"})

    def jobs(
        self, *, state: str | None = None, name: str | None = None, label: str | None = None, limit: int | None = None
    ) -> list[Json]:
        """Return jobs, newest first, at most ``limit`` in all."""
        return list(self.items("/jobs", limit, state=state, name=name, label=label))

    def job(self, job_id: str) -> Json:
        return self.json("GET", f"/jobs/{_part(job_id)}")

    def cancel(self, job_id: str) -> Json:
        return self.json("POST", f"/jobs/{_part(job_id)}/cancel")

    def retry(self, job_id: str, *, idempotency_key: str | None = None) -> Json:
        return self.json("POST", f"/jobs/{_part(job_id)}/retry", headers=once(idempotency_key))

    def delete_job(self, job_id: str) -> None:
        self.request("DELETE", f"/jobs/{_part(job_id)}")

    def wait(
        self,
        job_id: str,
        *,
        timeout_seconds: float | None = None,
        poll_seconds: float = 0.5,
        on_update: Callable[[Json], None] | None = None,
    ) -> Json:
        """Wait until the job has ended (succeeded, failed or cancelled), and return it.

        A service that is restarted meanwhile is waited for: up to a minute without a response is not an error.

        Args:
            job_id: The job.
            timeout_seconds: Longest time to wait; None for no limit.
            poll_seconds: Time between two requests.
            on_update: Called with the job after each request.

        Raises:
            TimeoutError: The job has not ended in time; it continues.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        last_answer = time.monotonic()
        while True:
            try:
                job = self.job(job_id)
                last_answer = time.monotonic()
                if on_update is not None:
                    on_update(job)
                if job["state"] in TERMINAL_STATES:
                    return job
            except Unreachable:
                if time.monotonic() - last_answer > 60:
                    raise
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {job_id} has not ended after {timeout_seconds:g} seconds; it goes on")
            time.sleep(poll_seconds)

    def logs(self, job_id: str, offset: int = 0) -> tuple[str, int]:
        """Return the log's text from byte ``offset`` on (a megabyte at most), and the offset for the next call.

        That offset is 0 if the log ends before ``offset``: a new log has then replaced the previous one.
        """
        answer = self.request(
            "GET", f"/jobs/{_part(job_id)}/logs", params={"offset": offset}, headers={"Accept": "text/plain"}
        )
        body = answer.content
        if int(answer.headers["Evenkeel-Next-Offset"]) < offset:
            return "", 0
        # A character of several bytes may be cut by the end of what there is so far: it is left for the next call.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(body)
        return text, offset + len(body) - len(decoder.getstate()[0])

    def read_logs(self, job_id: str) -> Iterator[str]:
        """Yield the log as it is now, in pieces."""
        text, offset = self.logs(job_id)
        while text:
            yield text
            text, offset = self.logs(job_id, offset)

    def follow_logs(self, job_id: str, *, poll_seconds: float = 0.5) -> Iterator[str]:
        """Yield the log as it grows, until the job has ended and all of it was read.

        A service that is restarted meanwhile is waited for, for a minute.
        """
        offset, last_answer = 0, time.monotonic()
        while True:
            try:
                ended = self.job(job_id)["state"] in TERMINAL_STATES
                text, following = self.logs(job_id, offset)
            except Unreachable:
                if time.monotonic() - last_answer > 60:
                    raise
                time.sleep(poll_seconds)
                continue
            last_answer = time.monotonic()
            anew, offset = following < offset, following
            if text:
                yield text
            elif ended and not anew:
                return
            elif not anew:
                time.sleep(poll_seconds)

    def events(self, job_id: str, last_event_id: str | None = None) -> Iterator[Json]:
        """Yield a job's server-sent events, ``{"id", "event", "data"}`` with decoded data, until they end."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_event_id} if last_event_id else {})
        timeout = httpx.Timeout(60, read=None)
        answer = self.request("GET", f"/jobs/{_part(job_id)}/events", stream=True, headers=headers, timeout=timeout)
        try:
            event: Json = {"id": None, "event": "message", "data": ""}
            for line in answer.iter_lines():
                if line:
                    field, _, value = line.partition(":")
                    value = value.removeprefix(" ")
                    if field == "data":
                        event["data"] += ("\n" if event["data"] else "") + value
                    elif field in ("id", "event"):
                        event[field] = value
                elif event["data"]:
                    yield event | {"data": json.loads(event["data"])}
                    event = {"id": event["id"], "event": "message", "data": ""}
        finally:
            answer.close()

    # --- datasets ----------------------------------------------------------------------------------------------------

    def datasets(self) -> list[Json]:
        return list(self.items("/datasets", None))

    def dataset(self, name: str) -> Json:
        return self.json("GET", f"/datasets/{_part(name)}")

    def add_dataset(self, dataset: Any) -> Json:
        """Register a DatasetSpec (or a mapping of one)."""
        return self.json("POST", "/datasets", json=_plain(dataset))

    def delete_dataset(self, name: str) -> None:
        self.request("DELETE", f"/datasets/{_part(name)}")

    def profile(self, name: str) -> Json:
        return self.json("GET", f"/datasets/{_part(name)}/profile")

    def infer_dataset(self, uri: str, name: str | None = None) -> Json:
        """Return a manifest proposed for a file that the service can read."""
        return self.json("POST", "/datasets/infer", json={"uri": uri} | ({"name": name} if name else {}))

    # --- schedules ---------------------------------------------------------------------------------------------------

    def schedules(self) -> list[Json]:
        return list(self.items("/schedules", None))

    def schedule(self, name: str) -> Json:
        return self.json("GET", f"/schedules/{_part(name)}")

    def add_schedule(self, schedule: Mapping[str, Any]) -> Json:
        """Create a schedule: ``name, cron, timezone, job, catchup, misfire_grace_seconds, overlap, paused``."""
        return self.json("POST", "/schedules", json=_plain(schedule))

    def change_schedule(self, name: str, **changes: Any) -> Json:
        return self.json("PATCH", f"/schedules/{_part(name)}", json=changes)

    def delete_schedule(self, name: str) -> None:
        self.request("DELETE", f"/schedules/{_part(name)}")

    def trigger(self, name: str, *, idempotency_key: str | None = None, **body: Any) -> Json:
        """Fire a schedule now."""
        return self.json("POST", f"/schedules/{_part(name)}/trigger", json=body, headers=once(idempotency_key))

    def firings(self, name: str, limit: int | None = None) -> list[Json]:
        return list(self.items(f"/schedules/{_part(name)}/firings", limit))

    # --- collections and views ---------------------------------------------------------------------------------------

    def collections(self) -> list[Json]:
        return list(self.items("/collections", None))

    def collection(self, collection: str) -> Json:
        return self.json("GET", f"/collections/{_part(collection)}")

    def versions(self, collection: str, limit: int | None = None) -> list[Json]:
        """Return the manifests of a collection's versions, newest first."""
        return list(self.items(f"/collections/{_part(collection)}/versions", limit))

    def version(self, collection: str, version: str = "current") -> Json:
        return self.json("GET", f"/collections/{_part(collection)}/versions/{_part(version)}")

    def promote(
        self, collection: str, version: str, reason: str, *, override_gate: bool = False, if_current: str | None = None
    ) -> Json:
        """Make a version the current one; an older version is a rollback. 409 if ``if_current`` is stale."""
        body: Json = {"reason": reason, "override_gate": override_gate}
        if if_current is not None:
            body["if_current"] = if_current
        path = f"/collections/{_part(collection)}/versions/{_part(version)}/promote"
        return self.json("POST", path, json=body, headers=once())

    def erase(self, collection: str, ids: Iterable[int | str], reason: str) -> Json:
        """Remove the rows of ids from every kept version and return {"versions", "rows"}.

        The ids stay out until ``readmit``.
        """
        return self.json("POST", f"/collections/{_part(collection)}/erase", json={"ids": list(ids), "reason": reason})

    def readmit(self, collection: str, ids: Iterable[int | str], reason: str) -> Json:
        """Let erased ids be published again and return {"ids": how many of them had been erased}."""
        return self.json("POST", f"/collections/{_part(collection)}/readmit", json={"ids": list(ids), "reason": reason})

    def calibration(self, collection: str) -> list[Json]:
        """Return the gate's limits and the null measurements behind them, by model family."""
        return list(self.json("GET", f"/collections/{_part(collection)}/calibration")["items"])

    def calibrate(
        self, collection: str, nulls: str, versions: Iterable[str], limits: Mapping[str, float] | None = None
    ) -> Json:
        """Calibrate the gate with versions of the scratch collection ``nulls`` (`evenkeel calibrate` creates them)."""
        body = {"nulls": nulls, "versions": list(versions), "limits": dict(limits or {})}
        return self.json("POST", f"/collections/{_part(collection)}/calibration", json=body)

    def canaries(self, collection: str) -> list[Json]:
        return list(self.json("GET", f"/collections/{_part(collection)}/canaries")["items"])

    def add_canary(self, collection: str, name: str, uri: str, seed: int = 0) -> Json:
        """Register a frozen consumer.

        Args:
            collection: The collection whose current version it is fitted on.
            name: Name of the canary.
            uri: A Parquet file with columns id and label that the service can read.
            seed: Seed of the fit.
        """
        body = {"name": name, "uri": uri, "seed": seed}
        return self.json("POST", f"/collections/{_part(collection)}/canaries", json=body)

    def copy_canaries(self, source: str, target: str) -> Json:
        """Register the canaries of one collection anew on the current version of another."""
        return self.json("POST", f"/collections/{_part(target)}/canaries", json={"copy_from": source})

    def delete_canary(self, collection: str, name: str) -> None:
        self.request("DELETE", f"/collections/{_part(collection)}/canaries/{_part(name)}")

    def snapshot(self, collection: str, path: Path | str, version: str = "current") -> Path:
        """Download all vectors of a version as Parquet; the file appears complete or not at all."""
        path = Path(path)
        unfinished = path.with_name(path.name + ".unfinished")
        path_of = f"/collections/{_part(collection)}/versions/{_part(version)}/snapshot"
        answer = self.request("GET", path_of, stream=True, headers={"Accept": "*/*"})
        try:
            with open(unfinished, "wb") as file:
                for chunk in answer.iter_bytes():
                    file.write(chunk)
            os.replace(unfinished, path)
        except httpx.TransportError as error:
            raise Unreachable(f"the snapshot broke off: {error or type(error).__name__}", "try again") from None
        finally:
            answer.close()
            unfinished.unlink(missing_ok=True)
        return path

    def views(self) -> list[Json]:
        return list(self.items("/views", None))

    def view(self, name: str) -> Json:
        return self.json("GET", f"/views/{_part(name)}")

    def add_view(self, view: Any) -> Json:
        """Create a view: ``name, collection, kind, dim, sigma, seed, frequencies, materialized``."""
        return self.json("POST", "/views", json=_plain(view))

    def advise_view(self, view: Any, epsilon: float = 0.05) -> Json:
        """Describe what a view would be, without creating it.

        Returns:
            ``view, exists, warnings``, and ``advice`` with the kernel errors at each dim, measured on the collection's
            own vectors, and the smallest dim within ``epsilon``.
        """
        return self.json("POST", "/views", json=_plain(view), params={"dry_run": "true", "epsilon": epsilon})

    def layer(
        self, name: str, version: str = "current", *, format: str = "safetensors", takes: str = "published"
    ) -> bytes:
        """Return a view's frontend layer as a file, with the view in its metadata.

        Args:
            name: The view.
            version: The version that the layer belongs to.
            format: ``safetensors`` (tensor ``frequencies`` U [m, d], for
                ``embeddings.rff.torch_module.RandomFourierLayer.load``) or ``onnx`` (``h`` [batch, d] to ``phi``).
            takes: The input of the layer: ``published`` vectors, or those of the ``model`` behind the version, whose
                alignment is then part of U.
        """
        accept = {"safetensors": "application/octet-stream", "onnx": "application/onnx"}
        if format not in accept:
            raise ValueError(f"format '{format}' is not one of {', '.join(accept)}")
        params, headers = {"version": version, "takes": takes}, {"Accept": accept[format]}
        return self.request("GET", f"/views/{_part(name)}/layer", params=params, headers=headers).content

    def delete_view(self, name: str) -> None:
        self.request("DELETE", f"/views/{_part(name)}")

    def neighbors(
        self, collection: str, *, id: Any = None, vector: Any = None, k: int = 10, version: str = "current"
    ) -> Json:
        """Return the ``k`` nearest items by cosine, to an id or to a vector of the collection's dim.

        Returns:
            ``version, exact, items`` with ``id`` and ``cosine`` each. ``exact`` is false if an index chose the
            candidates.
        """
        query = {"id": _scalar(id)} if id is not None else {"vector": [float(x) for x in vector]}
        body = query | {"k": k, "version": version}
        return self.json("POST", f"/collections/{_part(collection)}/neighbors", json=body)

    def vectors_table(
        self,
        collection: str | None = None,
        ids: Any = (),
        *,
        view: str | None = None,
        version: str = "current",
        dtype: str = "float32",
    ) -> pa.Table:
        """Return vectors as a pyarrow Table with columns ``id, status, vector`` (null where missing).

        The parameters are those of :meth:`vectors`.
        """
        table, _ = self._fetched(collection, ids, view, version, dtype, None)
        assert table is not None  # 304 answers an If-None-Match alone
        return table

    def vectors(
        self,
        collection: str | None = None,
        ids: Any = (),
        *,
        view: str | None = None,
        version: str = "current",
        dtype: str = "float32",
        as_: As = "numpy",
        previous: Vectors | None = None,
    ) -> Any:
        """Return vectors in the order requested, duplicates included.

        More than 10,000 ids are fetched in several requests, all from the version that answered the first one.

        Args:
            collection: Its default view (RFF) is served.
            ids: A list, or any kind of array, tensor or series.
            view: The name of a view to fetch from instead of a collection.
            version: A name pins the version.
            dtype: ``float32`` or ``float16``.
            as_: ``numpy`` (:class:`service.client.vectors.Vectors`: ``vectors`` [n, dim] is NaN where an id is
                missing), ``torch`` (the same with tensors) or ``polars`` (a DataFrame, null where missing).
            previous: What the same call returned before. If it is still current, it is returned itself and no vectors
                are sent.
        """
        from service.client.vectors import decoded

        known = None if previous is None else previous.etag
        table, etag = self._fetched(collection, ids, view, version, dtype, known)
        return previous if table is None else decoded(table, as_, etag)

    def _fetched(
        self, collection: str | None, ids: Any, view: str | None, version: str, dtype: str, etag: str | None
    ) -> tuple[pa.Table | None, str]:
        """Return the table, None if ``etag`` is still valid, and the etag of the first request."""
        import pyarrow as pa

        from service.client.vectors import table_of

        if (collection is None) == (view is None):
            raise ValueError("give a collection (its default view is served) or view=NAME, not both")
        path = f"/views/{_part(view)}/vectors" if view is not None else f"/collections/{_part(str(collection))}/vectors"
        wanted = _ids(ids)
        tables: list[pa.Table] = []
        headers = {"Accept": ARROW_STREAM} | ({"If-None-Match": etag} if etag else {})
        for start in range(0, max(len(wanted), 1), MAX_IDS):
            body = {"ids": wanted[start : start + MAX_IDS], "version": version, "dtype": dtype}
            answer = self.request("POST", path, json=body, headers=headers)
            if not tables:
                if answer.status_code == 304:
                    return None, str(etag)
                etag, version = answer.headers.get("ETag", ""), answer.headers["Evenkeel-Version"]
                headers = {"Accept": ARROW_STREAM}
            tables.append(table_of(answer.content))
        return (tables[0] if len(tables) == 1 else pa.concat_tables(tables)), etag or ""

    # --- webhooks ----------------------------------------------------------------------------------------------------

    def webhooks(self) -> list[Json]:
        return list(self.items("/webhooks", None))

    def add_webhook(self, url: str, events: Iterable[str] | None = None) -> Json:
        """Register a webhook; the response holds the secret that signs its deliveries, which is never shown again."""
        chosen = {} if events is None else {"events": list(events)}
        return self.json("POST", "/webhooks", json={"url": url, **chosen})

    def webhook(self, webhook_id: str) -> Json:
        return self.json("GET", f"/webhooks/{_part(webhook_id)}")

    def change_webhook(self, webhook_id: str, **changes: Any) -> Json:
        return self.json("PATCH", f"/webhooks/{_part(webhook_id)}", json=changes)

    def delete_webhook(self, webhook_id: str) -> None:
        self.request("DELETE", f"/webhooks/{_part(webhook_id)}")

    def ping_webhook(self, webhook_id: str) -> Json:
        """Send a test event."""
        return self.json("POST", f"/webhooks/{_part(webhook_id)}/ping")

    def deliveries(self, webhook_id: str, limit: int | None = None) -> list[Json]:
        """Return a webhook's deliveries, newest first."""
        return list(self.items(f"/webhooks/{_part(webhook_id)}/deliveries", limit))

    def redeliver(self, webhook_id: str, delivery_id: str) -> Json:
        """Repeat a delivery under the same id."""
        return self.json("POST", f"/webhooks/{_part(webhook_id)}/deliveries/{_part(delivery_id)}/retry")

    # --- keys and health ---------------------------------------------------------------------------------------------

    def keys(self) -> list[Json]:
        return list(self.items("/keys", None))

    def create_key(self, name: str, scopes: Iterable[str], tenant: str | None = None) -> Json:
        """Create a key; the response holds the key itself, which is never shown again.

        Args:
            name: Name of the key.
            scopes: What the key may do.
            tenant: A tenant other than the caller's own, for operators; it is created with its first key.
        """
        headers = {"Evenkeel-Tenant": tenant} if tenant is not None else {}
        return self.json("POST", "/keys", json={"name": name, "scopes": list(scopes)}, headers=headers)

    def rotate_key(self, key_id: str, overlap_seconds: float = 24 * 3600) -> Json:
        """Give a key a new secret; the previous one stays valid for ``overlap_seconds``."""
        return self.json("POST", f"/keys/{_part(key_id)}/rotate", json={"overlap_seconds": overlap_seconds})

    def tenants(self) -> list[Json]:
        """Return all tenants for an operator, otherwise the caller's own."""
        return list(self.items("/tenants", None))

    def audit(self, limit: int | None = 50, **filters: str) -> list[Json]:
        """Return who did what to which object, newest first; ``filters``: ``key``, ``since``, ``until``."""
        return list(self.items("/audit", limit, **filters))

    def revoke_key(self, key_id: str) -> None:
        self.request("DELETE", f"/keys/{_part(key_id)}")

    def ready(self) -> Json:
        """Return the service's readiness report (``/readyz``)."""
        return self.json("GET", "/readyz", prefix="")


def _part(text: str) -> str:
    """Quote one path segment: a name with a slash in it must not become another route."""
    return quote(str(text), safe="")


def _plain(value: Any) -> Any:
    """Convert pydantic models and arrays to values that JSON can hold."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    if hasattr(value, "to_pylist"):
        return value.to_pylist()
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def _ids(values: Any) -> list[Any]:
    """Return ids as JSON values, from a list or any kind of array, tensor or series."""
    for method in ("to_pylist", "tolist", "to_list"):
        if hasattr(values, method):
            return list(getattr(values, method)())
    return [_scalar(one) for one in values]


def _scalar(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
