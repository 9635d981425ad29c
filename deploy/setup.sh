#!/usr/bin/env bash
# Makes .venv and installs Evenkeel into it. Idempotent: does nothing when the lock, pyproject.toml
# and the CPU kernel's sources are unchanged.
# EXTRA=cpu, cuda or cpu-torch-SERIES (a later torch, of deploy/torch-SERIES.txt) picks the lock; without it the lock of .venv is kept, and a
# new .venv has cpu. PYTHON picks the interpreter (of a version that pyproject.toml admits); TORCH_INDEX an index of CPU builds of torch, where
# the configured package index has none.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV="${VENV:-.venv}"
# `make demo` after `make setup EXTRA=cuda` keeps the packages for CUDA.
EXTRA="${EXTRA:-$(cat "$VENV/.evenkeel-extra" 2>/dev/null || echo cpu)}"
LOCK="deploy/requirements-${EXTRA}.lock"
NEEDED_DISK_MB=4000
NEEDED_MEMORY_MB=4000
CUDA_BUILD_MB=12000
[ "$EXTRA" = cuda ] && NEEDED_DISK_MB=16000

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

LOCKS="$(for lock in deploy/requirements-c[pu]*.lock; do basename "$lock" .lock; done | sed 's/^requirements-//' | paste -sd ' ')"
[ -f "$LOCK" ] || fail "no lock $LOCK: EXTRA must be one of $LOCKS, not '$EXTRA'"
# Compile the CPU kernel once for each instruction set; do nothing if it is up to date.
build_kernel() { "$VENV/bin/python" embeddings/kernels/cpu/build.py > /dev/null || fail "the CPU kernel was not built"; }
stamp="$(cat "$LOCK" pyproject.toml "$0" | sha256sum | cut -d' ' -f1)"
if [ -x "$VENV/bin/evenkeel" ] && [ "$(cat "$VENV/.evenkeel-stamp" 2>/dev/null)" = "$stamp" ]; then
  build_kernel
  exit 0
fi

. deploy/versions.sh
SERIES="deploy/${EXTRA#cpu-}.txt"
[ ! -f "$SERIES" ] || TORCH="$(sed -n 's/^torch==//p' "$SERIES")"
PYTHON="${PYTHON:-python$LOWEST}"
command -v "$PYTHON" >/dev/null 2>&1 || PYTHON=python3
command -v "$PYTHON" >/dev/null 2>&1 \
  || fail "no python$LOWEST on PATH: install Python >=$LOWEST,<$BELOW or set PYTHON=/path/to/its/python"
"$PYTHON" -c "import sys; sys.exit(not (${LOWEST/./, },) <= sys.version_info[:2] < (${BELOW/./, },))" \
  || fail "Python >=$LOWEST,<$BELOW is needed, $PYTHON is $("$PYTHON" --version 2>&1): set PYTHON=/path/to/its/python"
disk_mb="$(df -Pm . | awk 'NR == 2 {print $4}')"
[ "$disk_mb" -ge "$NEEDED_DISK_MB" ] \
  || fail "${disk_mb} MB free on the disk of $PWD, ${NEEDED_DISK_MB} MB needed: free some space or set VENV to another disk"
memory_mb="$(awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo 2>/dev/null || true)"
[ -z "$memory_mb" ] || [ "$memory_mb" -ge "$NEEDED_MEMORY_MB" ] \
  || fail "${memory_mb} MB of memory available, ${NEEDED_MEMORY_MB} MB needed: stop other programs first"

# pip cannot go on from packages that it was killed amid.
if [ -e "$VENV/.evenkeel-unfinished" ]; then
  echo "setup: the last set-up was cut off: removing $VENV"
  rm -rf "$VENV"
fi
echo "setup: making $VENV from $LOCK (a few minutes the first time)"
rm -f "$VENV/.evenkeel-stamp"
"$PYTHON" -m venv "$VENV"
touch "$VENV/.evenkeel-unfinished"
echo "$EXTRA" > "$VENV/.evenkeel-extra"
# Most of what pip would compile, for more than a processor's minute, is never imported; Python compiles what it imports.
install=("$VENV/bin/python" -m pip --disable-pip-version-check -qq install --no-compile)

# Installing torch, installing the other packages and compiling the kernel take a processor's minute or two each, and none needs
# another: they run beside each other.
have_compiler() { [ -n "${CXX:-}" ] || command -v c++ g++ clang++ >/dev/null; }
kernel=
if have_compiler; then build_kernel & kernel=$!; fi
# torch is in no lock: its build differs between indexes, so no single hash fits, while its version does.
install_torch() {
  if [ "$EXTRA" = cuda ]; then "${install[@]}" --no-deps "torch==${TORCH}"
  elif [ -n "${TORCH_INDEX:-}" ]; then "${install[@]}" --no-deps --index-url "$TORCH_INDEX" "torch==${TORCH}"
  else "${install[@]}" --no-deps "torch==${TORCH}+cpu" 2>/dev/null; fi
}
install_torch & torch=$!
# pip keeps one processor busy: each of two takes every other package.
# --no-deps: torchrec asks for the CUDA build of fbgemm, which clashes with the CPU build; the lock is complete.
install_half() {
  local half="$VENV/half-$1-${LOCK##*/}"
  awk -v half="$1" '/^[^ #]/ {number++} number % 2 == half' "$LOCK" > "$half"
  "${install[@]}" --no-deps --require-hashes -r "$half"
}
install_half 0 & half=$!
install_half 1 || { wait; exit 1; }
wait "$half" || { wait; exit 1; }
if ! wait "$torch"; then
  [ "$EXTRA" != cuda ] && [ -z "${TORCH_INDEX:-}" ] || { wait; exit 1; }
  # The plain build of such an index is made for CUDA, and does not import without the packages that it asks for.
  [ "$disk_mb" -ge "$CUDA_BUILD_MB" ] || fail "the package index has no CPU build of torch ${TORCH}, and ${disk_mb} MB of disk are" \
    "too few for the CUDA build (${CUDA_BUILD_MB} MB): set TORCH_INDEX to PyTorch's index of CPU builds (its installation page names it)"
  echo "setup: the package index has no CPU build of torch: taking the CUDA build, several GB (TORCH_INDEX=URL of an index of CPU builds saves them)"
  "${install[@]}" "torch==${TORCH}"
fi
[ -z "$kernel" ] || wait "$kernel" || exit 1
"${install[@]}" --no-deps --no-build-isolation -e .
if ! have_compiler; then
  echo "setup: no C++ compiler here: taking one from deploy/requirements-compiler.lock (100 MB)"
  "${install[@]}" --no-deps --require-hashes -r deploy/requirements-compiler.lock
  build_kernel
fi
# Compiled here: this code, and all that service, commands and runs import. Where Python may not write what it compiled, each process
# would compile it again, for seconds.
"$VENV/bin/python" -m compileall -qq embeddings trainer service
"$VENV/bin/python" -c 'import fbgemm_gpu, ray, service.app, service.cli.main, torch, torchrec, trainer.launch.fork_server
print("setup: torch", torch.__version__, "with fbgemm", fbgemm_gpu.__version__)'
rm "$VENV/.evenkeel-unfinished"
echo "$stamp" > "$VENV/.evenkeel-stamp"
