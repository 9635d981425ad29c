#!/usr/bin/env bash
# Builds the wheel of evenkeel-client into the folder $1, with setuptools of $PYTHON.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
service=$here/../../service
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$stage/evenkeel/client"
cp "$here/pyproject.toml" "$here/README.md" "$stage/"
cp "$service/__init__.py" "$service/py.typed" "$stage/evenkeel/"
cp "$service"/client/*.py "$stage/evenkeel/client/"
"${PYTHON:-python3}" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$1" "$stage"
