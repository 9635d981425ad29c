"""Access rights of the service's files: for their owner, and for a group that EVENKEEL_HOME is shared with on purpose.

A home directory with the setgid bit is shared with a group, as Kubernetes sets up a volume with ``fsGroup``.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

log = logging.getLogger("evenkeel")


def umask_for(home: Path) -> int:
    """Return the umask of a service with this EVENKEEL_HOME: 0077, or 0007 if it is shared with a group."""
    return 0o007 if home.is_dir() and os.stat(home).st_mode & stat.S_ISGID else 0o077


def is_open(directory: Path) -> bool:
    """Return True if users other than the owner, or than its group if shared, may enter or list a directory."""
    return bool(os.stat(directory).st_mode & umask_for(directory))


def close(directory: Path) -> None:
    """Revoke the rights of other users on a directory, and log a warning whether that succeeds or fails."""
    status = os.stat(directory)
    mode = stat.S_IMODE(status.st_mode) & ~umask_for(directory)
    try:
        os.chmod(directory, mode)
    except OSError as error:
        log.warning("%s can be read by other users and its mode cannot be changed: %s", directory, error)
    else:
        log.warning("%s could be read by other users: its mode is now %o", directory, mode)
