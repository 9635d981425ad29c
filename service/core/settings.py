"""Configuration of the service: directories, URLs, limits. Read once and passed on, never looked up at import."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import unquote, urlsplit

from embeddings.store.url import with_quoted_password
from service.core.ssrf_guard import Network, parse_networks
from service.core.tenants import DEFAULT_TENANT, url_of
from trainer.spec.uri_schemes import is_object, is_topic
from trainer.storage.storage_registry import open_storage

Role = Literal["all", "api", "scheduler", "vectors"]
ROLES: tuple[str, ...] = get_args(Role)
MIN_FREE_BYTES = 64 * 2**20
"""Free space below which EVENKEEL_HOME counts as full."""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
MOST_DAYS = 36_500
"""A time so long ago can still be written."""
EXECUTOR_SETTINGS = {
    "ray_address": "EVENKEEL_RAY_ADDRESS",
    "internal_url": "EVENKEEL_INTERNAL_URL",
    "shared_runs": "EVENKEEL_RUN_STORAGE with a directory",
    "stored_runs": "EVENKEEL_RUN_STORAGE with a URI",
    "driver_resources": "EVENKEEL_DRIVER_RESOURCES",
}
"""Variables of settings that only some executors read; service.jobs.executors checks them."""


@dataclasses.dataclass(frozen=True)
class RetentionDays:
    """How many days a job's data is kept after its end, and how long firings are listed."""

    jobs: float = 400.0
    logs: float = 90.0
    checkpoints: float = 30.0
    events: float = 30.0
    firings: float = 400.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """The configuration of one process.

    Attributes:
        home: Directory of everything that has no URL of its own: database, store, runs, ``admin.key``.
        data_roots: A dataset's files must lie under one of these after symbolic links are resolved.
        tenant_data_roots: Data roots of tenants other than the default one, as (tenant, root); a tenant that is not
            listed has none.
        object_roots: The same as ``data_roots`` in object storage, ``s3://BUCKET/PREFIX``.
        tenant_object_roots: The same as ``tenant_data_roots`` in object storage.
        topic_roots: The same as ``data_roots`` for topics, ``kafka://HOST:PORT,HOST:PORT`` or that with ``/TOPIC``.
        tenant_topic_roots: The same as ``tenant_data_roots`` for topics.
        private: Where the service keeps files of its own, paths and uris of objects: no data, also below a root. Home,
            store and run storage are added; a tenant's settings keep those of the service.
        allowed_hosts: Host header values (without port) that are answered; a DNS-rebinding page sends a different one.
        log_format: None for lines of text on a terminal and JSON elsewhere.
        access_log: Whether each request is logged; None for yes if the format is JSON and no if it is text.
        retry_backoff_seconds: Wait before a run's second attempt; each later one waits twice as long as the last.
        silence_seconds: A run that reports nothing for this long is given up.
        tenant_max_jobs: Maximum number of a tenant's waiting and running jobs; None for no limit.
        max_runs: Maximum number of simultaneous runs.
        host_cores: Cores of this host that runs may use; None for all, as for the next two.
        host_memory_bytes: Memory of this host that runs may use.
        host_gpus: GPUs of this host that runs may use.
        requests_per_second: Limit per key in each process; 0 for no limit.
        retention: How long data is kept before it is removed.
        disk_warn_bytes: With less free space under ``home`` the service warns.
        disk_reserve_bytes: With less free space under ``home`` no run is started.
        tracking_uris: Servers that jobs may name in ``tracking``, whose credentials are in this environment.
        target_networks: Networks that are not public but may still be called if users name an address in them.
        executor: Where runs are executed: a name of service.jobs.executors.registry.
        executor_options: The executor's own settings by name, in capitals: ``EVENKEEL_EXECUTOR_NAME`` (see its class).
        ray_address: The cluster that a local run joins, HOST:PORT, or the dashboard to which ``ray_jobs`` submits,
            http://HOST:PORT.
        internal_url: Where runs of ``ray_jobs`` reach this service. Needed with ``run_storage``; without both they
            share ``home`` with the service.
        run_storage: Where files of runs lie for all hosts: a directory that the nodes of ``ray_jobs`` mount at this
            path, or a URI (:mod:`trainer.storage.storage_registry`) such as ``s3://BUCKET/PREFIX``; None: in ``home``.
        unanswered_seconds: How long a cluster may not answer before its jobs show that.
        driver_resources: Custom Ray resources that select the node of a run's driver; the head node if empty.
    """

    home: Path = Path(".evenkeel")
    database_url: str = ""
    store_url: str = ""
    data_roots: tuple[Path, ...] = (Path("."),)
    tenant_data_roots: tuple[tuple[str, Path], ...] = ()
    object_roots: tuple[str, ...] = ()
    tenant_object_roots: tuple[tuple[str, str], ...] = ()
    topic_roots: tuple[str, ...] = ()
    tenant_topic_roots: tuple[tuple[str, str], ...] = ()
    private: tuple[str, ...] = ()
    ray_address: str | None = None
    executor: str = "local"
    executor_options: tuple[tuple[str, str], ...] = ()
    internal_url: str | None = None
    run_storage: str | None = None
    driver_resources: tuple[tuple[str, float], ...] = ()
    unanswered_seconds: float = 60.0
    role: Role = "all"
    allowed_hosts: tuple[str, ...] = LOCAL_HOSTS
    target_networks: tuple[Network, ...] = ()
    tracking_uris: tuple[str, ...] = ()
    log_format: Literal["json", "text"] | None = None
    access_log: bool | None = None
    max_body_bytes: int = 8 * 2**20
    requests_per_second: float = 2000.0
    session_seconds: float = 12 * 3600
    follow_seconds: float = 0.5
    schedule_seconds: float = 1.0
    webhook_seconds: float = 1.0
    retry_backoff_seconds: float = 10.0
    cancel_grace_seconds: float = 60.0
    silence_seconds: float = 300.0
    max_runs: int = 1
    tenant_max_jobs: int | None = None
    retention: RetentionDays = RetentionDays()
    disk_warn_bytes: int = 5 * 2**30
    disk_reserve_bytes: int = 2**30
    host_cores: float | None = None
    host_memory_bytes: int | None = None
    host_gpus: float | None = None

    def __post_init__(self) -> None:
        home = self.home.expanduser().absolute()
        object.__setattr__(self, "home", home)
        object.__setattr__(self, "data_roots", tuple(Path(os.path.realpath(root)) for root in self.data_roots))
        of_tenants = tuple((tenant, Path(os.path.realpath(root))) for tenant, root in self.tenant_data_roots)
        object.__setattr__(self, "tenant_data_roots", of_tenants)
        if not self.database_url:
            object.__setattr__(self, "database_url", f"sqlite+aiosqlite:///{home / 'evenkeel.db'}")
        if not self.store_url:
            object.__setattr__(self, "store_url", str(home / "store"))
        object.__setattr__(self, "store_url", with_quoted_password(self.store_url))
        if self.role not in ROLES:
            raise ValueError(f"role '{self.role}' is not one of {', '.join(ROLES)}")
        self._check_cluster_urls()
        own = map(_place, (str(home), self.store_url, self.run_storage or ""))
        object.__setattr__(self, "private", tuple(dict.fromkeys((*self.private, *filter(None, own)))))

    def _check_cluster_urls(self) -> None:
        if self.stored_runs is not None:
            open_storage(self.stored_runs)
            object.__setattr__(self, "run_storage", self.stored_runs.rstrip("/"))
        elif self.shared_runs is not None and not self.shared_runs.is_absolute():
            raise ValueError(f"EVENKEEL_RUN_STORAGE is '{self.run_storage}': a directory is absolute")
        if self.internal_url is not None:
            host = urlsplit(self.internal_url)
            if host.scheme not in ("http", "https") or not host.hostname:
                raise ValueError(f"EVENKEEL_INTERNAL_URL is '{self.internal_url}': write http://HOST:PORT")
            object.__setattr__(self, "internal_url", self.internal_url.rstrip("/"))
            if host.hostname not in self.allowed_hosts:
                object.__setattr__(self, "allowed_hosts", (*self.allowed_hosts, host.hostname))

    @property
    def shared_runs(self) -> Path | None:
        """The directory, mounted by all nodes, that holds one directory per run."""
        return Path(self.run_storage) if self.run_storage and "://" not in self.run_storage else None

    @property
    def stored_runs(self) -> str | None:
        """The URI below which each run has its files, while hosts have caches."""
        return self.run_storage if self.run_storage and "://" in self.run_storage else None

    @property
    def runs(self) -> Path:
        """The directory that holds one directory per job."""
        return self.home / "runs"

    @property
    def admin_key_file(self) -> Path:
        return self.home / "admin.key"

    def run_dir(self, job_id: str) -> Path:
        return self.runs / job_id

    def for_tenant(self, tenant: str) -> Settings:
        """Return these settings with the data roots and the store of a tenant."""
        if tenant == DEFAULT_TENANT:
            return self
        roots = tuple(root for owner, root in self.tenant_data_roots if owner == tenant)
        objects = tuple(root for owner, root in self.tenant_object_roots if owner == tenant)
        topics = tuple(root for owner, root in self.tenant_topic_roots if owner == tenant)
        return dataclasses.replace(
            self, data_roots=roots, object_roots=objects, topic_roots=topics, store_url=url_of(self.store_url, tenant)
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from environment variables; an unset or empty variable means the default.

        Among them are, with the prefix ``EVENKEEL``:

        - _HOME, _DATABASE_URL, _STORE_URL, _RAY_ADDRESS, _EXECUTOR, _INTERNAL_URL, _RUN_STORAGE, _REQUESTS_PER_SECOND;
        - _DATA_ROOTS (separated by ``:``) and _TENANT_DATA_ROOTS (``TENANT=ROOT``, separated by ``:``), where a root is
          a directory, ``s3://BUCKET/PREFIX``, ``kafka://HOST:PORT,HOST:PORT`` or that with ``/TOPIC``;
        - _DRIVER_RESOURCES (``NAME=NUMBER``, separated by ``,``), and what begins with the executor's name;
        - _ALLOWED_HOSTS (separated by ``,``, added to the local names), _TARGET_NETWORKS and _TRACKING_URIS (separated
          by ``,``).

        Args:
            environment: The variables; None for those of this process.

        Raises:
            ValueError: A variable is invalid.
        """
        source = os.environ if environment is None else environment

        def value(name: str) -> str:
            return source.get(f"EVENKEEL_{name}", "").strip()

        if "EVENKEEL_CLUSTER_RUNS" in source:
            raise ValueError("EVENKEEL_CLUSTER_RUNS is EVENKEEL_RUN_STORAGE now: give that the same path, and unset it")
        roots = _roots(value("DATA_ROOTS"))
        of_tenants = tuple(part.partition("=") for part in _roots(value("TENANT_DATA_ROOTS")))
        if any(not (tenant and root) for tenant, _, root in of_tenants):
            raise ValueError("EVENKEEL_TENANT_DATA_ROOTS: write TENANT=DIRECTORY, separated by ':'")
        numbers: dict[str, Any] = {
            name: _number(name, text, least) for name, least in LEAST.items() if (text := value(name.upper()))
        }
        days = {
            field.name: _number(name, text, 0, MOST_DAYS)
            for field in dataclasses.fields(RetentionDays)
            if (text := value((name := f"keep_{field.name}_days").upper()))
        }
        executor = value("EXECUTOR") or "local"
        prefix = f"EVENKEEL_{executor.upper()}_"
        hosts = tuple(host.strip().lower() for host in value("ALLOWED_HOSTS").split(",") if host.strip())
        return cls(
            home=Path(value("HOME") or ".evenkeel"),
            database_url=value("DATABASE_URL"),
            store_url=value("STORE_URL"),
            data_roots=tuple(Path(root) for root in roots if _is_directory(root)) if roots else (Path("."),),
            tenant_data_roots=tuple((tenant, Path(root)) for tenant, _, root in of_tenants if _is_directory(root)),
            object_roots=tuple(root for root in roots if is_object(root)),
            tenant_object_roots=tuple((tenant, root) for tenant, _, root in of_tenants if is_object(root)),
            topic_roots=tuple(root.rstrip("/") for root in roots if is_topic(root)),
            tenant_topic_roots=tuple((tenant, root.rstrip("/")) for tenant, _, root in of_tenants if is_topic(root)),
            ray_address=value("RAY_ADDRESS") or None,
            executor=executor,
            executor_options=tuple(
                (name.removeprefix(prefix), value(name.removeprefix("EVENKEEL_")))
                for name in sorted(source)
                if name.startswith(prefix) and source[name].strip()
            ),
            internal_url=value("INTERNAL_URL") or None,
            run_storage=value("RUN_STORAGE") or None,
            driver_resources=_resources(value("DRIVER_RESOURCES")),
            allowed_hosts=LOCAL_HOSTS + hosts,
            target_networks=parse_networks(value("TARGET_NETWORKS")),
            tracking_uris=tuple(uri.strip().rstrip("/") for uri in value("TRACKING_URIS").split(",") if uri.strip()),
            retention=RetentionDays(**days),
            **numbers,
            log_format=_one_of("EVENKEEL_LOG_FORMAT", value("LOG_FORMAT"), {"json": "json", "text": "text"}),
            access_log=_one_of("EVENKEEL_ACCESS_LOG", value("ACCESS_LOG"), {"0": False, "1": True}),
        )


def _roots(text: str) -> tuple[str, ...]:
    """Split at colons, except at that of ``s3://`` and before the ports of brokers."""
    roots: list[str] = []
    for part in re.split(r":(?!//)", text):
        if roots and _LACKS_PORT.fullmatch(roots[-1]):
            roots[-1] += f":{part}"
        elif part:
            roots.append(part)
    return tuple(roots)


_LACKS_PORT = re.compile(r"(?:[^=/]+=)?kafka://(?:[^,:/]+:\d+,)*[^,:/]+")


def _is_directory(root: str) -> bool:
    return not (is_object(root) or is_topic(root))


def _place(url: str) -> str:
    """Return the real path of a directory, or the uri of a prefix of objects; nothing for a store of another kind."""
    parts = urlsplit(url)
    if "://" in url and parts.scheme != "file":
        host = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{host}{parts.path}".rstrip("/") if is_object(url) else ""
    path = unquote(parts.path) if "://" in url else url
    return os.path.realpath(path) if path else ""


LEAST = dict.fromkeys(("silence_seconds", "max_runs", "tenant_max_jobs"), 1) | {
    "unanswered_seconds": 0, "retry_backoff_seconds": 0,
    "requests_per_second": 0, "disk_warn_bytes": 0, "disk_reserve_bytes": 0, "host_cores": 0,
    "host_memory_bytes": 0, "host_gpus": 0,
}  # fmt: skip
"""Settings that are numbers, and the least that each may be."""
WHOLE = {field.name for field in dataclasses.fields(Settings) if str(field.type).startswith("int")}


def _number(name: str, given: str, least: float, most: float = math.inf) -> float:
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not least <= number <= most or number == math.inf:
        variable, bound = f"EVENKEEL_{name.upper()}", "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{variable} is '{given}': set it to a number of at least {least:g}{bound}, or leave it out")
    return int(number) if name in WHOLE else number


Value = TypeVar("Value")


def _resources(given: str) -> tuple[tuple[str, float], ...]:
    pairs = [part.partition("=") for part in given.split(",") if part.strip()]
    try:
        return tuple((name.strip(), float(number)) for name, _, number in pairs)
    except ValueError:
        raise ValueError("EVENKEEL_DRIVER_RESOURCES: write NAME=NUMBER, separated by ','") from None


def _one_of(variable: str, given: str, choices: Mapping[str, Value]) -> Value | None:
    if not given:
        return None
    if given not in choices:
        raise ValueError(f"{variable} is '{given}': set it to {' or '.join(choices)}, or leave it out")
    return choices[given]
