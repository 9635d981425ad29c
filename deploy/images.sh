#!/usr/bin/env bash
# Builds the image for each of KINDS (cpu cuda) with podman, buildah or docker, whichever is installed, and prints its
# size and its largest parts in MB. OPTIONS are passed to the build. TAG (default: the version in pyproject.toml) is the
# tag that docker-compose.yml uses.
set -euo pipefail
cd "$(dirname "$0")/.."
KINDS="${KINDS:-cpu cuda}"
. deploy/versions.sh
TAG="${TAG:-$VERSION}"
PARTS="du -sm /opt/evenkeel/.venv/lib/python3.*/site-packages/* /usr 2>/dev/null | sort -rn | head -10"

fail() { printf 'images: %s\n' "$*" >&2; exit 1; }

for tool in podman buildah docker none; do
  if command -v "$tool" >/dev/null && "$tool" info >/dev/null 2>&1; then break; fi
done
[ "$tool" != none ] || fail "neither podman nor buildah nor a running docker is available: install one (Debian: apt install podman)"

for kind in $KINDS; do
  case "$kind" in cpu) name="evenkeel:$TAG" ;; cuda) name="evenkeel:$TAG-cuda" ;; *) fail "KINDS is '$kind': cpu, cuda or both" ;; esac
  # Without --format docker, podman and buildah drop HEALTHCHECK.
  format=(); [ "$tool" = docker ] || format=(--format docker)
  # shellcheck disable=SC2086  # OPTIONS are several words
  "$tool" build "${format[@]}" ${OPTIONS:-} -f deploy/Dockerfile --build-arg "EXTRA=$kind" --build-arg "VERSION=$VERSION" -t "$name" .
  if [ "$tool" = buildah ]; then
    container="$(buildah from --pull-never "$name")"
    size="$(buildah images --format '{{.Size}}' "$name")"
    parts="$(buildah run "$container" -- sh -c "$PARTS")"
    buildah rm "$container" >/dev/null
  else
    size="$("$tool" image inspect --format '{{.Size}}' "$name" | awk '{printf "%d MB", $1 / 1000000}')"
    parts="$("$tool" run --rm --network none --entrypoint sh "$name" -c "$PARTS")"
  fi
  printf 'images: %s %s\n%s\n' "$name" "$size" "$parts"
done
