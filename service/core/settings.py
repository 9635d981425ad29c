"""Configuration of the service: directories, URLs, limits. Read once and passed on, never read at import."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import unquote, urlsplit

from embeddings.store.url import with_quoted_password
from service.core import added_roots
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
"""Longest retention: 100 years, so that dates stay representable."""
EXECUTOR_SETTINGS = {
    "ray_address": "EVENKEEL_RAY_ADDRESS",
    "internal_url": "EVENKEEL_INTERNAL_URL",
    "shared_runs": "EVENKEEL_RUN_STORAGE with a directory",
    "stored_runs": "EVENKEEL_RUN_STORAGE with a URI",
    "driver_resources": "EVENKEEL_DRIVER_RESOURCES",
}
"""Settings that only some executors read, with their variables; service.jobs.executors checks them."""


@dataclasses.dataclass(frozen=True)
class RetentionDays:
    """Retention periods in days: for a job's data after the job's end, and for a schedule's firings."""

    jobs: float = 400.0
    logs: float = 90.0
    checkpoints: float = 30.0
    events: float = 30.0
    firings: float = 400.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """The configuration of one process; service.core.environment documents each variable.

    Attributes:
        data_roots: Directories that datasets may use: a file must lie in one of them after symbolic links are resolved.
        tenant_data_roots: Pairs (tenant, root) for tenants other than the default one; a tenant without a pair has no
            roots.
        private: Paths and URIs of the service's own files, which datasets may not use even below a root. Home, store
            and run storage are added. :meth:`for_tenant` keeps this field.
        allowed_hosts: Values of the Host header (without port) that are accepted; a page that attacks by DNS rebinding
            sends another value.
        executor_options: Pairs (NAME, value) of the executor's own settings, from the variables
            ``EVENKEEL_<EXECUTOR>_<NAME>``.
        internal_url: Address at which runs of ``ray_jobs`` reach this service. Needed with ``run_storage``; without
            both, the runs share ``home`` with the service.
        run_storage: Shared place of all runs' files: a directory that the nodes of ``ray_jobs`` mount at this path,
            or a URI (:mod:`trainer.storage.storage_registry`) such as ``s3://BUCKET/PREFIX``; None: in ``home``.
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
    tenant: str = DEFAULT_TENANT
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
    sinks: str | None = None
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
        home = Path(self.home).expanduser().absolute()
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
        locations = map(_location, (str(home), self.store_url, self.run_storage or ""))
        object.__setattr__(self, "private", tuple(dict.fromkeys((*self.private, *filter(None, locations)))))

    def _check_cluster_urls(self) -> None:
        if self.stored_runs is not None:
            open_storage(self.stored_runs)
            object.__setattr__(self, "run_storage", self.stored_runs.rstrip("/"))
        elif self.shared_runs is not None and not self.shared_runs.is_absolute():
            raise ValueError(f"EVENKEEL_RUN_STORAGE is '{self.run_storage}': a directory must be an absolute path")
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
        """The URI below which each run's files are kept; hosts have copies only as caches."""
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
        """Return these settings with the data roots and the store of a tenant; the default one's with added roots."""
        if tenant == DEFAULT_TENANT:
            return self._with_added_roots()
        roots: dict[str, Any] = {
            kind: tuple(root for owner, root in getattr(self, f"tenant_{kind}") if owner == tenant)
            for kind in _ROOT_KINDS
        }
        return dataclasses.replace(self, **roots, store_url=url_of(self.store_url, tenant), tenant=tenant)

    def _with_added_roots(self) -> Settings:
        added = [
            root
            for root in added_roots.read(self.home)
            if root not in self.data_roots and not any(root.is_relative_to(private) for private in self.private)
        ]
        if not added:
            return self
        settings = dataclasses.replace(self)
        # Links are not resolved again: a folder that was replaced by a link would open what the link leads to.
        object.__setattr__(settings, "data_roots", (*self.data_roots, *added))
        return settings

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from environment variables; an unset or empty variable gives the default.

        Args:
            environment: The variables; None for the environment of this process.

        Raises:
            ValueError: A variable is invalid.
        """
        variables = os.environ if environment is None else environment
        if "EVENKEEL_CLUSTER_RUNS" in variables:
            raise ValueError(
                "EVENKEEL_CLUSTER_RUNS was renamed: set EVENKEEL_RUN_STORAGE to the same path, and unset it"
            )
        given = {
            name.removeprefix("EVENKEEL_"): text.strip()
            for name, text in sorted(variables.items())
            if name.startswith("EVENKEEL_") and text.strip()
        }
        values: dict[str, Any] = {name: given[name.upper()] for name in _TEXTS if name.upper() in given}
        values |= {
            name: _number(name, given[name.upper()], least) for name, least in LEAST.items() if name.upper() in given
        }
        days = {
            field.name: _number(name, given[name.upper()], 0, MOST_DAYS)
            for field in dataclasses.fields(RetentionDays)
            if (name := f"keep_{field.name}_days").upper() in given
        }
        roots = _roots(given.get("DATA_ROOTS", ""))
        of_tenants = [part.partition("=")[::2] for part in _roots(given.get("TENANT_DATA_ROOTS", ""))]
        if not all(tenant and root for tenant, root in of_tenants):
            raise ValueError("EVENKEEL_TENANT_DATA_ROOTS: write TENANT=DIRECTORY, separated by ':'")
        for kind, (belongs, convert) in _ROOT_KINDS.items():
            if roots:
                values[kind] = tuple(convert(root) for root in roots if belongs(root))
            values[f"tenant_{kind}"] = tuple((tenant, convert(root)) for tenant, root in of_tenants if belongs(root))
        prefix = f"{given.get('EXECUTOR', 'local').upper()}_"
        return cls(
            **values,
            executor_options=tuple(
                (name.removeprefix(prefix), text) for name, text in given.items() if name.startswith(prefix)
            ),
            driver_resources=_resources(given.get("DRIVER_RESOURCES", "")),
            allowed_hosts=(*LOCAL_HOSTS, *(host.lower() for host in _listed(given.get("ALLOWED_HOSTS", "")))),
            target_networks=parse_networks(given.get("TARGET_NETWORKS", "")),
            tracking_uris=tuple(uri.rstrip("/") for uri in _listed(given.get("TRACKING_URIS", ""))),
            retention=RetentionDays(**days),
            log_format=_one_of("LOG_FORMAT", given, {"json": "json", "text": "text"}),
            access_log=_one_of("ACCESS_LOG", given, {"0": False, "1": True}),
        )


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _roots(text: str) -> tuple[str, ...]:
    """Split at colons, except at the colon of ``s3://`` and before the ports of brokers."""
    roots: list[str] = []
    for part in re.split(r":(?!//)", text):
        if roots and _LACKS_PORT.fullmatch(roots[-1]):
            roots[-1] += f":{part}"
        elif part:
            roots.append(part)
    return tuple(roots)


_LACKS_PORT = re.compile(r"(?:[^=/]+=)?kafka://(?:[^,:/]+:\d+,)*[^,:/]+")


_TEXTS = ("home", "database_url", "store_url", "ray_address", "executor", "internal_url", "run_storage", "sinks")
"""Settings whose value is the text of the variable, unconverted."""
_ROOT_KINDS: dict[str, tuple[Callable[[str], bool], Callable[[str], Any]]] = {
    "data_roots": (lambda root: not (is_object(root) or is_topic(root)), Path),
    "object_roots": (is_object, str),
    "topic_roots": (is_topic, lambda root: root.rstrip("/")),
}
"""Settings with the roots of EVENKEEL_DATA_ROOTS, by kind: a test for roots of the kind, and a conversion."""


def _location(url: str) -> str:
    """Return the real path of a directory, or the URI of an object prefix; empty for a store of another kind."""
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
"""Smallest allowed value of each numeric setting, except the retention days."""
WHOLE = {field.name for field in dataclasses.fields(Settings) if str(field.type).startswith("int")}


def _number(name: str, text: str, least: float, most: float = math.inf) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most or number == math.inf:
        variable, bound = f"EVENKEEL_{name.upper()}", "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{variable} is '{text}': set it to a number of at least {least:g}{bound}, or leave it out")
    return int(number) if name in WHOLE else number


Value = TypeVar("Value")


def _resources(text: str) -> tuple[tuple[str, float], ...]:
    pairs = [part.partition("=") for part in _listed(text)]
    try:
        return tuple((name.strip(), float(number)) for name, _, number in pairs)
    except ValueError:
        raise ValueError("EVENKEEL_DRIVER_RESOURCES: write NAME=NUMBER, separated by ','") from None


def _one_of(name: str, given: Mapping[str, str], choices: Mapping[str, Value]) -> Value | None:
    if name not in given:
        return None
    if given[name] not in choices:
        raise ValueError(f"EVENKEEL_{name} is '{given[name]}': set it to {' or '.join(choices)}, or leave it out")
    return choices[given[name]]
