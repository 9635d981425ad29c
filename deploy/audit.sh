#!/bin/sh
# Reports known vulnerabilities of the packages in deploy/requirements-cpu.lock. Exits with 1 for one that
# deploy/audit-allowed.txt does not name; if the vulnerability data cannot be fetched, it says so and exits with 0.
set -eu
cd "$(dirname "$0")/.."
python="${1:-.venv/bin/python}"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
allowed="$(sed -n 's/^\([A-Z][A-Za-z0-9-]*\)  *.*/--ignore-vuln \1/p' deploy/audit-allowed.txt | tr '\n' ' ')"
# shellcheck disable=SC2086
if timeout "${AUDIT_SECONDS:-30}" "$python" -m pip_audit --disable-pip --no-deps --progress-spinner off --timeout 10 \
    -r deploy/requirements-cpu.lock $allowed > "$log" 2>&1; then
  echo "dependency audit: no known vulnerability"
elif grep -q "^Found [0-9]* known vulnerabilit" "$log"; then
  cat "$log"
  echo "dependency audit: raise the version in pyproject.toml and run 'make lock', or allow it with a reason in deploy/audit-allowed.txt" >&2
  exit 1
else
  reason="$(grep -v '^WARNING' "$log" | tail -n 1 | cut -c1-120)"
  echo "dependency audit: SKIPPED, the vulnerability data cannot be fetched here (${reason:-no answer in time})"
fi
