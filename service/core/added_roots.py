"""Data roots that an operator adds while the service runs, in a file in EVENKEEL_HOME that is read at each check.

Only ``evenkeel roots`` on the service's machine writes the file: there is no operation for it. A line has the real path
of one directory. The roots are those of the default tenant.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from embeddings.durable_files import write_file
from service.core.modes import umask_for

log = logging.getLogger("evenkeel")
FILE = "data_roots"
"""Name of the file in EVENKEEL_HOME."""


def read(home: Path) -> tuple[Path, ...]:
    """Return the added roots; none, with a warning in the log, if the file cannot be read or others may write it.

    A link is not followed.
    """
    path = home / FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ()
    except OSError as error:
        log.warning("%s is not read: %s", path, error.strerror)
        return ()
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) or mode & 0o022 & umask_for(home):
        os.close(descriptor)
        log.warning("%s is not read: it is no file, or other users may write it", path)
        return ()
    with open(descriptor, encoding="utf-8", errors="surrogateescape") as file:
        return tuple(Path(line) for line in file.read().split("\n") if line.startswith("/"))


def write(home: Path, roots: Iterable[Path]) -> None:
    """Replace the added roots, in a file that only the owner of EVENKEEL_HOME may read, or its group if shared.

    Raises:
        OSError: The file cannot be written.
    """
    text = "".join(f"{root}\n" for root in roots)
    write_file(home / FILE, text.encode("utf-8", "surrogateescape"), mode=0o666 & ~umask_for(home))
