# For other scripts to source, in the repository's root: what pyproject.toml says of versions. LOWEST and BELOW: Python is
# at least the one and below the other. TORCH: the pinned version. VERSION: Evenkeel's own.
LOWEST="$(sed -n 's/^requires-python = ">=\([0-9.]*\),<[0-9.]*"$/\1/p' pyproject.toml)"
BELOW="$(sed -n 's/^requires-python = ">=[0-9.]*,<\([0-9.]*\)"$/\1/p' pyproject.toml)"
VERSION="$(sed -n 's/^version = "\([0-9][^"]*\)"$/\1/p' pyproject.toml)"
TORCH="$(sed -n 's/^  "torch==\([0-9.]*\)",$/\1/p' pyproject.toml)"
if [ -z "$LOWEST" ] || [ -z "$BELOW" ] || [ -z "$TORCH" ] || [ -z "$VERSION" ]; then
  echo 'pyproject.toml: write requires-python = ">=LOWEST,<BELOW", and "torch==VERSION" on a line of dependencies' >&2
  exit 1
fi
