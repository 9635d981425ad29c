"""Build the compiled kernels, once for each instruction set: ``python -m embeddings.kernels.cpu.build``.

The compiler is $CXX, else the system's, else that of the ziglang package. A library's name contains the hash of its
sources, so that a library built from other sources is never loaded. This module imports nothing of the project.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LEVEL_VARIABLE = "EVENKEEL_CPU_LEVEL"
FLAGS = (
    "-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-fopenmp-simd",
    "-Wall", "-Werror=switch",
    # Allow vector instructions for roots and loops, but no fused or reordered operations, so that every level
    # gives the same bits.
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
)  # fmt: skip
# Instruction sets of each architecture, best last, with the flags that /proc/cpuinfo lists if a processor has them.
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "x86-64-v2": (),
        "x86-64-v3": ("avx2", "bmi2", "f16c", "fma"),
        "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    },
    "aarch64": {"armv8-a": ()},
}
# Prefetch cache lines for writing; older processors ignore the instruction.
MACHINE_FLAGS = {"x86_64": ("-mprfchw",), "aarch64": ()}


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message has the reason and the remedy."""


def levels() -> dict[str, tuple[str, ...]]:
    """Return the instruction sets of this machine's architecture, with the processor flags that each needs."""
    machine = platform.machine()
    if machine not in LEVELS:
        raise BuildError(f"there are no compiled kernels for {machine} machines: x86_64 and aarch64 have them")
    return LEVELS[machine]


@cache
def source_hash() -> str:
    """Return a hash of the sources and the compiler flags."""
    digest = hashlib.sha256(repr((FLAGS, MACHINE_FLAGS)).encode())
    for path in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def library_path(level: str | None = None) -> Path:
    """Return the library for ``level``, by default $EVENKEEL_CPU_LEVEL or the best level that this processor runs.

    Raise RuntimeError if the library has not been built from the present sources.
    """
    level = level or os.environ.get(LEVEL_VARIABLE) or best_level()
    path = _path(level)
    if not path.exists():
        known = ", ".join(levels())
        raise RuntimeError(
            f"{path} is missing: the compiled kernels were not built, or their sources have changed since; "
            f"run `python -m embeddings.kernels.cpu.build` (instruction sets: {known})"
        )
    return path


def best_level() -> str:
    """Return the best instruction set that this processor has."""
    flags: set[str] = set()
    for row in Path("/proc/cpuinfo").read_text().splitlines():
        if row.startswith("flags"):
            flags = set(row.partition(":")[2].split())
            break
    needed: set[str] = set()
    found = next(iter(levels()))
    for level, more in levels().items():
        needed |= set(more)
        if needed <= flags:
            found = level
    return found


def build() -> list[Path]:
    """Compile missing libraries, two at a time, remove those of other sources, and return the paths of all.

    Raise BuildError if there is no compiler, or compilation fails.
    """
    wanted = {level: _path(level) for level in levels()}
    missing = [level for level, path in wanted.items() if not path.exists()]
    if missing:
        compiler = _compiler()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda level: _compile(compiler, level, wanted[level]), reversed(missing)))
    for path in SOURCES.glob("*.so"):
        if path not in wanted.values():
            path.unlink()
    return list(wanted.values())


def _path(level: str) -> Path:
    return SOURCES / f"kernel-{level}-{source_hash()}.so"


def _compiler() -> list[str]:
    given = os.environ.get("CXX")
    if given:
        return shlex.split(given)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise BuildError("no C++ compiler: install g++ or clang++, or `pip install ziglang`, or name one in CXX")


def _march(compiler: list[str], level: str) -> str:
    if "ziglang" not in compiler:
        return f"-march={level}"
    return "-mcpu=" + {"armv8-a": "generic"}.get(level, level.replace("-", "_"))


def _compile(compiler: list[str], level: str, path: Path) -> None:
    # A temporary name for each process, because another may be compiling the same library.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
    flags = [*FLAGS, *MACHINE_FLAGS[platform.machine()], _march(compiler, level)]
    command = [*compiler, *flags, *sources, "-o", str(temporary)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()[-4000:]}")
        temporary.replace(path)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}: name a C++ compiler in CXX") from error
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        print(*build(), sep="\n")
    except BuildError as error:
        sys.exit(f"build: {error}")
