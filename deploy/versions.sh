# Sourced by other scripts in the repository's root: sets versions from pyproject.toml. Python must be at least LOWEST and
# below BELOW. TORCH: the pinned version. VERSION: Evenkeel's own.
LOWEST="$(sed -n 's/^requires-python = ">=\([0-9.]*\),<[0-9.]*"$/\1/p' pyproject.toml)"
BELOW="$(sed -n 's/^requires-python = ">=[0-9.]*,<\([0-9.]*\)"$/\1/p' pyproject.toml)"
VERSION="$(sed -n 's/^version = "\([0-9][^"]*\)"$/\1/p' pyproject.toml)"
TORCH="$(sed -n 's/^  "torch==\([0-9.]*\)",$/\1/p' pyproject.toml)"
if [ -z "$LOWEST" ] || [ -z "$BELOW" ] || [ -z "$TORCH" ] || [ -z "$VERSION" ]; then
  echo 'pyproject.toml: write requires-python = ">=LOWEST,<BELOW", and "torch==VERSION" on a line of dependencies' >&2
  exit 1
fi
