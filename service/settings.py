"""What the service is told from outside: directories, URLs, limits. Read once, passed on, never looked up at import."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

Role = Literal["all", "api", "scheduler", "vectors"]
ROLES: tuple[str, ...] = get_args(Role)
MIN_FREE_BYTES = 64 * 2**20
"""With less, EVENKEEL_HOME counts as full."""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclasses.dataclass(frozen=True)
class Settings:
    """``home`` holds what has no URL of its own: database, store, runs, ``admin.key``.

    ``data_roots``: a dataset's files must lie under one of these after symbolic links are resolved.
    ``allowed_hosts``: Host header values (without port) that are answered; a DNS-rebinding page has another.
    """

    home: Path = Path(".evenkeel")
    database_url: str = ""
    store_url: str = ""
    data_roots: tuple[Path, ...] = (Path("."),)
    ray_address: str | None = None
    role: Role = "all"
    allowed_hosts: tuple[str, ...] = LOCAL_HOSTS
    max_body_bytes: int = 8 * 2**20
    session_seconds: float = 12 * 3600
    follow_seconds: float = 0.5
    schedule_seconds: float = 1.0
    retry_backoff_seconds: float = 10.0
    cancel_grace_seconds: float = 60.0

    def __post_init__(self) -> None:
        home = self.home.expanduser().absolute()
        object.__setattr__(self, "home", home)
        object.__setattr__(self, "data_roots", tuple(Path(os.path.realpath(root)) for root in self.data_roots))
        if not self.database_url:
            object.__setattr__(self, "database_url", f"sqlite+aiosqlite:///{home / 'evenkeel.db'}")
        if not self.store_url:
            object.__setattr__(self, "store_url", str(home / "store"))
        if self.role not in ROLES:
            raise ValueError(f"role '{self.role}' is not one of {', '.join(ROLES)}")

    @property
    def runs(self) -> Path:
        """One directory per job."""
        return self.home / "runs"

    @property
    def admin_key_file(self) -> Path:
        return self.home / "admin.key"

    def run_dir(self, job_id: str) -> Path:
        return self.runs / job_id

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """EVENKEEL_HOME, _DATABASE_URL, _STORE_URL, _DATA_ROOTS (separated by ``:``), _RAY_ADDRESS and
        _ALLOWED_HOSTS (separated by ``,``, added to the local names). Unset or empty means the default."""
        source = os.environ if environment is None else environment

        def value(name: str) -> str:
            return source.get(f"EVENKEEL_{name}", "").strip()

        roots = tuple(Path(root) for root in value("DATA_ROOTS").split(os.pathsep) if root)
        hosts = tuple(host.strip().lower() for host in value("ALLOWED_HOSTS").split(",") if host.strip())
        return cls(
            home=Path(value("HOME") or ".evenkeel"),
            database_url=value("DATABASE_URL"),
            store_url=value("STORE_URL"),
            data_roots=roots or (Path("."),),
            ray_address=value("RAY_ADDRESS") or None,
            allowed_hosts=LOCAL_HOSTS + hosts,
        )
