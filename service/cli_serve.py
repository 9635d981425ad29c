"""CLI commands that need the service's own code rather than a request to it: serve, reset-admin."""

from __future__ import annotations

import asyncio
from pathlib import Path

from service import cli_output as output
from service.cli_output import CommandError


def serve(role: str, host: str, port: int, num_workers: int = 1) -> int:
    """Runs the service until it is told to stop; the exit code. Raises CommandError for a role that is none, and for
    several workers in a role that must be there once."""
    from service.settings import ROLES, Settings

    if role not in ROLES:
        raise CommandError(f"--role {role}: no such role", f"one of {', '.join(ROLES)}", output.USAGE)
    if num_workers > 1 and role != "vectors":
        raise CommandError(
            f"--workers {num_workers} with --role {role}: jobs are looked after by one process",
            "serve vectors from a process of its own: --role vectors --workers N",
            output.USAGE,
        )
    from service import app

    return app.serve(Settings.from_environment(), host, port, role, num_workers=num_workers)  # type: ignore[arg-type]


def reset_admin() -> Path:
    """Replaces the admin key. Returns the file that holds the new one."""
    from service.keys import reset_admin as reset
    from service.settings import Settings

    settings = Settings.from_environment()
    asyncio.run(reset(settings))
    return settings.admin_key_file
