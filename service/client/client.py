"""Python client of the service: HTTP calls that return the REST interface's JSON as dictionaries, and vectors as numpy.

Only httpx is imported until vectors are requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .fetch import VectorCalls, ids_of
from .http import Json, once, part, plain
from .jobs import JobCalls


class Client(JobCalls, VectorCalls):
    """A session with one service. Thread-safe as httpx.Client is; close it, or use it as a context manager.

    Every method raises :class:`ProblemError` for an error response, :class:`Unreachable` if there is no response, and
    :class:`ServiceError` for a response that is not JSON. Requests that submit or retry a job, trigger a schedule or
    promote a version carry an Idempotency-Key. Such requests are sent again if the response is lost, yet take effect
    once.

    Args:
        url: Address of the service; None: EVENKEEL_URL, else the default port of this machine.
        api_key: API key of the service; None: EVENKEEL_API_KEY, else the key in ``$EVENKEEL_HOME/admin.key``, else no
            key.
        timeout_seconds: Longest wait for a response, or for the next part of one.

    Raises:
        ServiceError: The key has characters that are not allowed in keys, or ``url`` is not a valid address.

    Example:
        >>> from service.client import Client
        >>> with Client() as client:  # EVENKEEL_URL and EVENKEEL_API_KEY, else the key in $EVENKEEL_HOME/admin.key
        ...     got = client.vectors("items", [10, 30, 10])
        ...     version = client.version("items")["version"]
        >>> got.vectors.shape, got.version == version  # rows in request order
        ((3, 32), True)
        >>> got.vectors[got.found].dtype  # leaves out missing ones, which are NaN
        dtype('float32')
    """

    # --- datasets ----------------------------------------------------------------------------------------------------

    def datasets(self) -> list[Json]:
        return list(self.items("/datasets"))

    def dataset(self, name: str) -> Json:
        return self.json("GET", f"/datasets/{part(name)}")

    def add_dataset(self, dataset: Any) -> Json:
        """Register a dataset, given as a DatasetSpec or as a mapping with the same fields."""
        return self.json("POST", "/datasets", json=plain(dataset))

    def update_dataset(self, dataset: Any) -> Json:
        """Replace the registered dataset of the same name; jobs keep the dataset that they were submitted with."""
        document = plain(dataset)
        return self.json("PUT", f"/datasets/{part(document['name'])}", json=document)

    def delete_dataset(self, name: str) -> None:
        self.request("DELETE", f"/datasets/{part(name)}")

    def profile(self, name: str) -> Json:
        return self.json("GET", f"/datasets/{part(name)}/profile")

    def infer_dataset(self, uri: str, name: str | None = None) -> Json:
        """Return a dataset manifest proposed for a file that the service can read."""
        return self.json("POST", "/datasets/infer", json={"uri": uri} | ({"name": name} if name else {}))

    # --- schedules ---------------------------------------------------------------------------------------------------

    def schedules(self) -> list[Json]:
        return list(self.items("/schedules"))

    def schedule(self, name: str) -> Json:
        return self.json("GET", f"/schedules/{part(name)}")

    def add_schedule(self, schedule: Mapping[str, Any]) -> Json:
        """Create a schedule from a mapping of its fields.

        The fields are ``name, cron, timezone, job, catchup, misfire_grace_seconds, overlap, paused``.
        """
        return self.json("POST", "/schedules", json=plain(schedule))

    def change_schedule(self, name: str, **changes: Any) -> Json:
        return self.json("PATCH", f"/schedules/{part(name)}", json=changes)

    def delete_schedule(self, name: str) -> None:
        self.request("DELETE", f"/schedules/{part(name)}")

    def trigger(self, name: str, *, idempotency_key: str | None = None, **body: Any) -> Json:
        """Fire a schedule now."""
        return self.json("POST", f"/schedules/{part(name)}/trigger", json=body, headers=once(idempotency_key))

    def firings(self, name: str, limit: int | None = None) -> list[Json]:
        return list(self.items(f"/schedules/{part(name)}/firings", limit))

    # --- collections and views ---------------------------------------------------------------------------------------

    def collections(self) -> list[Json]:
        return list(self.items("/collections"))

    def collection(self, collection: str) -> Json:
        return self.json("GET", f"/collections/{part(collection)}")

    def versions(self, collection: str, limit: int | None = None) -> list[Json]:
        """Return the manifests of a collection's versions, newest first."""
        return list(self.items(f"/collections/{part(collection)}/versions", limit))

    def version(self, collection: str, version: str = "current") -> Json:
        return self.json("GET", f"/collections/{part(collection)}/versions/{part(version)}")

    def promote(
        self, collection: str, version: str, reason: str, *, override_gate: bool = False, if_current: str | None = None
    ) -> Json:
        """Make a version current; promoting an older version is a rollback. 409 if ``if_current`` is stale."""
        body: Json = {"reason": reason, "override_gate": override_gate}
        if if_current is not None:
            body["if_current"] = if_current
        path = f"/collections/{part(collection)}/versions/{part(version)}/promote"
        return self.json("POST", path, json=body, headers=once())

    def erase(self, collection: str, ids: Any, reason: str, *, users: bool = False) -> Json:
        """Remove the rows of ids from every kept version; return {"versions": those rewritten, "rows": rows removed}.

        The ids, a list or any kind of array, tensor or series, stay out until ``readmit``. The ids are item ids, or
        user ids if ``users`` is True.
        """
        body = {"ids": ids_of(ids), "reason": reason, **({"part": "users"} if users else {})}
        return self.json("POST", f"/collections/{part(collection)}/erase", json=body)

    def readmit(self, collection: str, ids: Any, reason: str, *, users: bool = False) -> Json:
        """Let erased ids be published again and return {"ids": the number of them that had been erased}."""
        body = {"ids": ids_of(ids), "reason": reason, **({"part": "users"} if users else {})}
        return self.json("POST", f"/collections/{part(collection)}/readmit", json=body)

    def canaries(self, collection: str) -> list[Json]:
        return list(self.items(f"/collections/{part(collection)}/canaries"))

    def add_canary(
        self, collection: str, name: str, uri: str, seed: int = 0, *, id_column: str = "id", label_column: str = "label"
    ) -> Json:
        """Register a frozen consumer.

        Args:
            collection: The collection whose current version it is fitted on.
            name: Name of the canary.
            uri: A table that the service can read, such as the item table.
            seed: Seed of the fit.
            id_column: The table's column of ids.
            label_column: The table's column of labels.
        """
        body = {"name": name, "uri": uri, "seed": seed, "id_column": id_column, "label_column": label_column}
        return self.json("POST", f"/collections/{part(collection)}/canaries", json=body)

    def copy_canaries(self, source: str, target: str) -> Json:
        """Fit the canaries (probes) of ``source`` on the current version of ``target``, and register them there."""
        return self.json("POST", f"/collections/{part(target)}/canaries", json={"copy_from": source})

    def delete_canary(self, collection: str, name: str) -> None:
        self.request("DELETE", f"/collections/{part(collection)}/canaries/{part(name)}")

    def views(self) -> list[Json]:
        return list(self.items("/views"))

    def view(self, name: str) -> Json:
        return self.json("GET", f"/views/{part(name)}")

    def add_view(self, view: Any) -> Json:
        """Create a view from a mapping with ``name, collection, kind, dim, sigma, seed, frequencies, materialized``."""
        return self.json("POST", "/views", json=plain(view))

    def advise_view(self, view: Any, epsilon: float = 0.05) -> Json:
        """Describe the view that :meth:`add_view` would create, without creating it.

        Returns:
            ``view, exists, warnings``, and ``advice`` with the kernel errors at each dim, measured on the collection's
            own vectors, and the smallest dim within ``epsilon``.
        """
        return self.json("POST", "/views", json=plain(view), params={"dry_run": "true", "epsilon": epsilon})

    def delete_view(self, name: str) -> None:
        self.request("DELETE", f"/views/{part(name)}")

    # --- webhooks ----------------------------------------------------------------------------------------------------

    def webhooks(self) -> list[Json]:
        return list(self.items("/webhooks"))

    def add_webhook(self, url: str, events: Iterable[str] | None = None) -> Json:
        """Register a webhook; the response holds the secret that signs its deliveries, which is never shown again."""
        chosen = {} if events is None else {"events": list(events)}
        return self.json("POST", "/webhooks", json={"url": url, **chosen})

    def webhook(self, webhook_id: str) -> Json:
        return self.json("GET", f"/webhooks/{part(webhook_id)}")

    def change_webhook(self, webhook_id: str, **changes: Any) -> Json:
        return self.json("PATCH", f"/webhooks/{part(webhook_id)}", json=changes)

    def delete_webhook(self, webhook_id: str) -> None:
        self.request("DELETE", f"/webhooks/{part(webhook_id)}")

    def ping_webhook(self, webhook_id: str) -> Json:
        """Send a ``ping`` event to a webhook, to test it."""
        return self.json("POST", f"/webhooks/{part(webhook_id)}/ping")

    def deliveries(self, webhook_id: str, limit: int | None = None) -> list[Json]:
        """Return a webhook's deliveries, newest first."""
        return list(self.items(f"/webhooks/{part(webhook_id)}/deliveries", limit))

    def redeliver(self, webhook_id: str, delivery_id: str) -> Json:
        """Send a delivery again under the same id."""
        return self.json("POST", f"/webhooks/{part(webhook_id)}/deliveries/{part(delivery_id)}/retry")

    # --- keys and health ---------------------------------------------------------------------------------------------

    def keys(self) -> list[Json]:
        return list(self.items("/keys"))

    def create_key(
        self, name: str, scopes: Iterable[str], tenant: str | None = None, expires_at: str | None = None
    ) -> Json:
        """Create a key; the response holds the key itself, which is never shown again.

        Args:
            name: Name of the key.
            scopes: Permissions of the key.
            tenant: A tenant other than the caller's own, for operators; it is created with its first key.
            expires_at: Time of expiry with time zone, such as "2027-01-31T18:00:00Z".
        """
        headers = {"Evenkeel-Tenant": tenant} if tenant is not None else {}
        body = {"name": name, "scopes": list(scopes), "expires_at": expires_at}
        return self.json("POST", "/keys", json=body, headers=headers)

    def rotate_key(self, key_id: str, overlap_seconds: float = 24 * 3600) -> Json:
        """Give a key a new secret; the previous one stays valid for ``overlap_seconds``."""
        return self.json("POST", f"/keys/{part(key_id)}/rotate", json={"overlap_seconds": overlap_seconds})

    def tenants(self) -> list[Json]:
        """Return all tenants for an operator, otherwise the caller's own."""
        return list(self.items("/tenants"))

    def audit(self, limit: int | None = 50, **filters: str | None) -> list[Json]:
        """Return entries of the audit log, newest first: at most ``limit``, or all if it is None.

        ``filters``: ``key``, ``since``, ``until``.
        """
        return list(self.items("/audit", limit, **filters))

    def revoke_key(self, key_id: str) -> None:
        self.request("DELETE", f"/keys/{part(key_id)}")

    def ready(self) -> Json:
        """Return the service's readiness report (``/readyz``)."""
        return self.json("GET", "/readyz", prefix="")
