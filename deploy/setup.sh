#!/usr/bin/env bash
# Makes .venv and installs Evenkeel into it. Idempotent: does nothing when the lock and pyproject.toml are unchanged.
# EXTRA=cpu (default) or EXTRA=cuda picks the lock; PYTHON picks the interpreter (3.11).
set -euo pipefail
cd "$(dirname "$0")/.."

EXTRA="${EXTRA:-cpu}"
PYTHON="${PYTHON:-python3.11}"
VENV="${VENV:-.venv}"
TORCH="2.13.0"
LOCK="deploy/requirements-${EXTRA}.lock"
NEEDED_DISK_MB=4000
NEEDED_MEMORY_MB=4000
[ "$EXTRA" = cuda ] && NEEDED_DISK_MB=16000

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

[ -f "$LOCK" ] || fail "no lock $LOCK: EXTRA must be cpu or cuda, not '$EXTRA'"
stamp="$(cat "$LOCK" pyproject.toml "$0" | sha256sum | cut -d' ' -f1)"
if [ -x "$VENV/bin/evenkeel" ] && [ "$(cat "$VENV/.evenkeel-stamp" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

command -v "$PYTHON" >/dev/null 2>&1 || PYTHON=python3
command -v "$PYTHON" >/dev/null 2>&1 || fail "no python3.11 on PATH: install Python 3.11 or set PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
  || fail "Python 3.11 is needed, $PYTHON is $("$PYTHON" --version 2>&1): set PYTHON=/path/to/python3.11"
disk_mb="$(df -Pm . | awk 'NR == 2 {print $4}')"
[ "$disk_mb" -ge "$NEEDED_DISK_MB" ] \
  || fail "${disk_mb} MB free on the disk of $PWD, ${NEEDED_DISK_MB} MB needed: free some space or set VENV to another disk"
memory_mb="$(awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo 2>/dev/null || true)"
[ -z "$memory_mb" ] || [ "$memory_mb" -ge "$NEEDED_MEMORY_MB" ] \
  || fail "${memory_mb} MB of memory available, ${NEEDED_MEMORY_MB} MB needed: stop other programs first"

echo "setup: making $VENV from $LOCK (a few minutes the first time)"
rm -f "$VENV/.evenkeel-stamp"
"$PYTHON" -m venv "$VENV"
pip=("$VENV/bin/python" -m pip --disable-pip-version-check -qq)

# torch comes first and alone: its build differs between indexes, so no single hash fits, while its version does.
if [ "$EXTRA" = cpu ]; then
  # The second index is asked only where the configured one has no CPU build: the plain build does not import without CUDA.
  "${pip[@]}" install --no-deps "torch==${TORCH}+cpu" 2>/dev/null \
    || "${pip[@]}" install --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==${TORCH}"
else
  "${pip[@]}" install --no-deps "torch==${TORCH}"
fi
# --no-deps: torchrec asks for the CUDA build of fbgemm, which clashes with the CPU build; the lock is complete.
"${pip[@]}" install --no-deps --require-hashes -r "$LOCK"
"${pip[@]}" install --no-deps --no-build-isolation -e .
"$VENV/bin/python" -c 'import torch, fbgemm_gpu; print("setup: torch", torch.__version__, "with fbgemm", fbgemm_gpu.__version__)'
echo "$stamp" > "$VENV/.evenkeel-stamp"
