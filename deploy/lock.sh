#!/usr/bin/env bash
# Resolves pyproject.toml into deploy/requirements-cpu.lock and deploy/requirements-cuda.lock, complete and with hashes.
# For each deploy/torch-SERIES.txt, whose versions replace those of pyproject.toml, it writes
# deploy/requirements-cpu-torch-SERIES.lock.
# torch itself stays out: deploy/setup.sh installs it first, by exact version, because its build differs between indexes.
# Needs uv; UV_FIND_LINKS may name a folder with the CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/.."
overrides="$(mktemp)"
trap 'rm -f "$overrides"' EXIT
. deploy/versions.sh

compile() { # extra, name of the lock, overrides...
  local extra="$1" lock="deploy/requirements-$2.lock"; shift 2
  printf '%s\n' "$@" > "$overrides"
  uv pip compile pyproject.toml --extra "$extra" --extra dev --python-version "$LOWEST" --python-platform x86_64-manylinux_2_28 \
    --override "$overrides" --generate-hashes --no-emit-package torch --no-annotate --no-header \
    --no-emit-find-links --no-emit-index-url --quiet -o "$lock" > /dev/null
}

# The override drops the CUDA build of fbgemm that torchrec requires.
compile cpu cpu "torch==$TORCH+cpu" 'fbgemm-gpu ; python_version < "3"'
shopt -s nullglob
for series in deploy/torch-*.txt; do
  name="cpu-$(basename "$series" .txt)"
  mapfile -t versions < "$series"
  # Begin with the usual lock, so that other packages keep their versions.
  [ -f "deploy/requirements-$name.lock" ] || cp deploy/requirements-cpu.lock "deploy/requirements-$name.lock"
  compile cpu "$name" "${versions[@]}" 'fbgemm-gpu ; python_version < "3"'
  # The index may have only torch's CUDA build, which needs these packages; the CPU build does not.
  awk '/^[^ ]/ {kept = !/^(nvidia|cuda)-/} kept' "deploy/requirements-$name.lock" > "$overrides"
  cp "$overrides" "deploy/requirements-$name.lock"
done
# A CPU build found through UV_FIND_LINKS would satisfy this line too, and hide the CUDA packages.
unset UV_FIND_LINKS
compile cuda cuda "torch==$TORCH"
