#!/usr/bin/env bash
# Resolves pyproject.toml into deploy/requirements-cpu.lock and deploy/requirements-cuda.lock, complete and with hashes.
# torch itself stays out: deploy/setup.sh installs it first, by exact version, because its build differs between indexes.
# Needs uv; UV_FIND_LINKS may name a folder with the CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/.."
overrides="$(mktemp)"
trap 'rm -f "$overrides"' EXIT
. deploy/versions.sh

compile() { # extra, overrides...
  local extra="$1"; shift
  printf '%s\n' "$@" > "$overrides"
  uv pip compile pyproject.toml --extra "$extra" --extra dev --python-version "$LOWEST" --python-platform x86_64-manylinux_2_28 \
    --override "$overrides" --generate-hashes --no-emit-package torch --no-annotate --no-header \
    --no-emit-find-links --no-emit-index-url --quiet -o "deploy/requirements-${extra}.lock" > /dev/null
}

# The override drops the CUDA build of fbgemm that torchrec asks for.
compile cpu "torch==$TORCH+cpu" 'fbgemm-gpu ; python_version < "3"'
# A CPU build found through UV_FIND_LINKS would satisfy this line too, and hide the CUDA packages.
unset UV_FIND_LINKS
compile cuda "torch==$TORCH"
