#!/usr/bin/env bash
# Makes .venv with everything that `make demo` and `make test` need, on any Linux machine without a GPU.
# Python 3.11 to 3.13: the one that find_python.sh finds or fetches.
# Done once: a second run sees that nothing changed and returns at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
pins=(tools/environment/cpu.txt tools/environment/dev.txt)
stamp=.venv/.installed
say() { printf '[setup] %s\n' "$*"; }
stop() { say "$*" >&2; exit 1; }

exec 9>.venv.lock
flock 9 # `make demo` and `make test` started together install once
transformer_engine=$(grep '^transformer-engine==' tools/environment/gpu.txt)
want=$({ echo "$transformer_engine"; cat "${pins[@]}" pyproject.toml tools/environment/{setup,find_python}.sh; } | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

[ "$(uname -s)" = Linux ] || stop "this needs Linux (found $(uname -s)): gloo, SGLang and process supervision are used as they are there"
python=$(tools/environment/find_python.sh)
free_mib=$(df -Pm . | awk 'NR==2 {print $4}')
[ "$free_mib" -gt 4000 ] || stop "about 3 GB are needed in $(pwd); $free_mib MiB are free"
command -v g++ >/dev/null || say "no g++ here (apt install g++): the C++ kernel's tests will fail, and the demo uses the slower eager statistics"

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  say "virtual environment .venv with $("$python" --version)"
  rm -rf .venv # what an interrupted attempt left
  "$python" -m venv .venv || stop "the virtual environment could not be made; on Debian and Ubuntu: apt install python3-venv"
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
(while sleep 15; do say "... $(ls .venv/lib/python3.*/site-packages 2>/dev/null | grep -c dist-info || true) of $total installed, ${SECONDS} s"; done) &
ticker=$!
trap 'kill "$ticker" 2>/dev/null || true; rm -f "$log"' EXIT
quietly "${pip[@]}" install --no-deps "${extra[@]}" -r "${pins[0]}" -r "${pins[1]}" || stop "the packages could not be installed; pip's words are above"
# Not into the environment, where Megatron-Core would build its layers of it: tests of what needs no GPU alone read it.
rm -rf .venv/gpu_sources
quietly "${pip[@]}" install --no-deps --target .venv/gpu_sources "$transformer_engine" ||
  stop "the Python sources of $transformer_engine (1 MB) could not be fetched; pip's words are above"
say "installing megatron_dppo itself"
quietly "${pip[@]}" install --no-deps --no-build-isolation -e . || stop "the project could not be installed; pip's words are above"
say "trying the libraries"
quietly .venv/bin/python -c "import torch, sglang, transformers, megatron_dppo.trainer, megatron.core" ||
  stop "the libraries do not load (above). Where torch is at fault, point TORCH_CPU_INDEX at an index with CPU builds, remove .venv and try again"
echo "$want" >"$stamp"
say "ready after ${SECONDS} s"
