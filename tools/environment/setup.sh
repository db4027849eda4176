#!/usr/bin/env bash
# Makes .venv with everything that `make demo` and `make test` need, on any Linux machine with Python 3.11 and no GPU.
# Done once: a second run sees that nothing changed and returns at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
pins=(tools/environment/cpu.txt tools/environment/dev.txt)
stamp=.venv/.installed
say() { printf '[setup] %s\n' "$*"; }
stop() { say "$*" >&2; exit 1; }

exec 9>.venv.lock
flock 9 # `make demo` and `make test` started together install once
want=$(cat "${pins[@]}" pyproject.toml tools/environment/setup.sh | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

is_311() { command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; }
[ "$(uname -s)" = Linux ] || stop "this needs Linux (found $(uname -s)): gloo, SGLang and process supervision are used as they are there"
python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3 python; do
    if is_311 "$candidate"; then python=$candidate; break; fi
  done
fi
[ -n "$python" ] || stop "Python 3.11 was not found on PATH; install it, or name it: PYTHON=/path/to/python3.11 make ..."
is_311 "$python" || stop "PYTHON=$python is not Python 3.11: $("$python" --version 2>&1 || true)"
free_mib=$(df -Pm . | awk 'NR==2 {print $4}')
[ "$free_mib" -gt 4000 ] || stop "about 3 GB are needed in $(pwd); $free_mib MiB are free"
command -v g++ >/dev/null || say "no g++ here (apt install g++): the C++ kernel's tests will fail, and the demo uses the slower eager statistics"

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  say "virtual environment .venv with $("$python" --version)"
  rm -rf .venv # what an interrupted attempt left
  "$python" -m venv .venv || stop "the virtual environment could not be made; on Debian and Ubuntu: apt install python3.11-venv"
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input)

# PyPI's Linux build of torch brings several GB of CUDA; the CPU build has its own index.
index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
extra=()
if .venv/bin/python -c "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=15)" "$index/torch/" 2>/dev/null; then
  extra=(--extra-index-url "$index")
else
  say "$index does not answer: torch comes from your configured package source"
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
quietly() { "$@" >"$log" 2>&1 || { cat "$log" >&2; return 1; }; }
total=$(cat "${pins[@]}" | grep -vc '^#')
say "installing $total pinned packages, about 2 GB: two to five minutes"
(while sleep 15; do say "... $(ls .venv/lib/python3.11/site-packages 2>/dev/null | grep -c dist-info || true) of $total installed, ${SECONDS} s"; done) &
ticker=$!
trap 'kill "$ticker" 2>/dev/null || true; rm -f "$log"' EXIT
quietly "${pip[@]}" install --no-deps "${extra[@]}" -r "${pins[0]}" -r "${pins[1]}" || stop "the packages could not be installed; pip's words are above"
say "installing megatron_dppo itself"
quietly "${pip[@]}" install --no-deps --no-build-isolation -e . || stop "the project could not be installed; pip's words are above"
say "trying the libraries"
quietly .venv/bin/python -c "import torch, sglang, transformers, megatron_dppo.trainer, megatron.core" ||
  stop "the libraries do not load (above). Where torch is at fault, point TORCH_CPU_INDEX at an index with CPU builds, remove .venv and try again"
echo "$want" >"$stamp"
say "ready after ${SECONDS} s"
