#!/usr/bin/env bash
# Prints a Python 3.11, 3.12 or 3.13 to build the environment with: PYTHON where it is set, else the first one on
# PATH, else one that uv downloads into its own cache (uv itself from PATH, or by any Python's pip).
# `find_python.sh 3.12`: none but this version.
set -euo pipefail
say() { printf '[setup] %s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }

versions=${1:-3.11 3.12 3.13}
list=${1:-3.11, 3.12 or 3.13}

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
fits() { case " $versions " in *" $(version "$1") "*) ;; *) return 1 ;; esac }

uv_python() {
  local uv=uv
  if ! command -v uv >/dev/null; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m pip --disable-pip-version-check --no-input install --quiet --target "$folder" uv >&2 || return 1
    uv=$folder/bin/uv
  fi
  "$uv" python install 3.12 >&2 && "$uv" python find --no-project --managed-python 3.12
}

if [ -n "${PYTHON:-}" ]; then
  fits "$PYTHON" || stop "PYTHON=$PYTHON is not Python $list, but '$(version "$PYTHON")'"
  echo "$PYTHON"
  exit
fi
for candidate in python3.11 python3.12 python3.13 python3 python; do
  if command -v "$candidate" >/dev/null && fits "$candidate"; then
    echo "$candidate"
    exit
  fi
done
say "no Python $list on PATH: fetching one with uv"
uv_python || stop "install Python $list (or uv, which fetches one), or name one: PYTHON=/path/to/python3.12 make ..."
