"""A disk that is soon full: a process with a tmpfs of its own mounted where only it sees it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked

_NOT_PERMITTED = 77
_NEW_MOUNTS, _NEW_USER, _PRIVATE, _RECURSIVE = 0x20000, 0x10000000, 1 << 18, 1 << 14  # sched.h, mount.h


def run(disk: Path, size: str, log: Path, function: Callable[..., Any], *arguments: Any) -> tuple[int, str]:
    """The exit code of a process that calls ``function`` with a disk of ``size`` mounted at ``disk``, and what it said
    to ``log``, which lies elsewhere. Skips where mounting is not permitted."""
    process = forked.start(_call, str(disk), size, function, arguments, log=log)
    process.join()
    said = log.read_text("utf-8", "replace")
    if process.exitcode == _NOT_PERMITTED:
        pytest.skip(f"mounting a tmpfs is not permitted: {said}")
    assert process.exitcode is not None
    return process.exitcode, said


def _call(disk: str, size: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        _mount(disk, size)
    except OSError as error:
        print(error)
        return _NOT_PERMITTED
    return function(*arguments)


def _mount(disk: str, size: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    _check(libc.unshare(_NEW_USER | _NEW_MOUNTS))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
    _check(libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None))
    _check(libc.mount(b"none", disk.encode(), b"tmpfs", 0, f"size={size}".encode()))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
