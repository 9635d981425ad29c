"""How kernels are compiled, and the disk cache that keeps the result for the next process.

Numba's own cache notices a change of the file of the function that it compiled, not of a function that was compiled
into it, and keeps an index that two processes can overwrite for each other. Here each compiled signature is one file,
named by what it was compiled from, in a folder named by the hash of all sources: there is nothing to go stale and
nothing to race for.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.serialize import dumps
from numba.misc.appdirs import AppDirs

PACKAGE = Path(__file__).parent
# Compiled code takes constants from these beside the package itself.
CONSTANTS = tuple(PACKAGE.parents[1] / name for name in ("philox.py", "rounding.py", "sse.py"))
# Folders of this many states of the sources are kept: of a few branches that are worked on in turns.
KEPT_FOLDERS = 4
_PREFIX = "evenkeel-"


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit`` with this package's options and disk cache; ``options`` are added (parallel, inline).

    Arrays are not reference-counted, as whoever calls holds them: counting is a call for each array that an inlined
    function names, at each row, with every vector register saved around it. So nothing can be allocated.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(nogil=True, error_model="numpy", fastmath={"contract"}, _nrt=False, **options)(function)
        if cache_folder() is not None:
            dispatcher._cache = _SourceHashCache(function)
        return dispatcher

    return decorate


@cache
def source_hash() -> str:
    """Of everything that compiled code is made from, Numba's version included."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in (*sorted(PACKAGE.glob("*.py")), *CONSTANTS):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def cache_folder() -> Path | None:
    """Where compiled code is kept: NUMBA_CACHE_DIR, this package's __pycache__ or the user's cache; None: nowhere."""
    given = numba.config.CACHE_DIR
    user_wide = AppDirs(appname="numba", appauthor=False).user_cache_dir
    for root in [Path(given)] if given else [PACKAGE / "__pycache__", Path(user_wide)]:
        folder = root / f"{_PREFIX}{source_hash()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Whether root or a read-only file system can be written shows only when it is tried.
            tempfile.TemporaryFile(dir=folder).close()
            os.utime(folder)
        except OSError:
            continue
        _remove_old_folders(root, folder)
        return folder
    return None


def _remove_old_folders(root: Path, current: Path) -> None:
    """All but the KEPT_FOLDERS used last. Another process may be doing the same."""
    used: list[tuple[float, Path]] = []
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            used.append((folder.stat().st_mtime, folder))
        except OSError:
            continue
    for _, folder in sorted(used, reverse=True)[KEPT_FOLDERS:]:
        if folder != current:
            shutil.rmtree(folder, ignore_errors=True)


class _Locator(_CacheLocator):
    """Sends Numba to the folder; all functions are told apart by module, name and line."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._py_file, self._line = file, function.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return source_hash()

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func, py_file)


class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]


class _SourceHashCache(FunctionCache):  # type: ignore[misc]
    """One file for each signature. A file that is missing, cut short or unwritable means: compile."""

    _impl_class = _Implementation

    def _path(self, key: object) -> Path:
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        return Path(self._cache_path) / f"{self._impl.filename_base}-{name}.bin"

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        key = self._index_key(sig, target_context.codegen())
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        digest, payload = content[:32], content[32:]
        if hashlib.sha256(payload).digest() != digest:
            return None
        return self._impl.rebuild(target_context, pickle.loads(payload))

    def _save_overload(self, sig: Any, data: Any) -> None:
        if not self._impl.check_cachable(data):
            return
        path = self._path(self._index_key(sig, data.codegen))
        payload = dumps(self._impl.reduce(data))
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
