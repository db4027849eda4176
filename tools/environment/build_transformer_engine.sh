#!/usr/bin/env bash
# Builds transformer-engine-torch from source against the torch that is installed; `make setup GPU=1` calls it. PyPI has the
# source alone, and its metadata names transformer-engine-cu12 whatever CUDA it is built for: so without its requirements.
# PYTHON: the environment's interpreter (.venv/bin/python). MAX_JOBS: compilers at once (all cores, a compiler for each 4 GB).
# Not yet run on a GPU machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
say() { printf '[transformer engine] %s\n' "$*"; }
stop() { say "$*" >&2; exit 1; }
. tools/environment/progress.sh
version=$(sed -n 's/^transformer-engine==//p' tools/environment/gpu.txt)

wanted=$("$python" -c 'import torch; print(torch.version.cuda or "")') || stop "$python has no torch; set PYTHON"
[ -n "$wanted" ] || stop "the torch of $python is built for CPUs; Transformer Engine needs the packages of tools/environment/gpu.txt"
if [ "$("$python" -c 'from importlib.metadata import version; print(version("transformer-engine-torch"))' 2>/dev/null)" = "$version" ]; then
  say "$version is there already"
  exit 0
fi
CUDA_HOME=$("$python" -c 'import os; from megatron_dppo.system.compute import toolkit_home; print(toolkit_home(os.environ) or "")')
[ -n "$CUDA_HOME" ] || stop "no CUDA toolkit: no CUDA_HOME, no nvcc on PATH, no /usr/local/cuda; install CUDA $wanted's (its headers and nvcc)"
found=$("$CUDA_HOME/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
[ "${found%%.*}" = "${wanted%%.*}" ] || stop "torch is built for CUDA $wanted; $CUDA_HOME has ${found:-no nvcc that answers}"
command -v g++ >/dev/null || stop "no g++ here"

# cuDNN's and NCCL's headers come with torch's own libraries, outside of the toolkit.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for package in cudnn nccl; do
  [ -d "$site/nvidia/$package/include" ] || stop "no headers in $site/nvidia/$package/include: install tools/environment/gpu.txt first"
done
jobs=$(($(awk '/MemAvailable/ {print $2}' /proc/meminfo) / 4000000))
jobs=$((jobs < 1 ? 1 : jobs > $(nproc) ? $(nproc) : jobs))
export CUDA_HOME MAX_JOBS=${MAX_JOBS:-$jobs}
# The last one: cusparse.h and the like, which a toolkit without the libraries' headers lacks.
export CPATH=$site/nvidia/cudnn/include:$site/nvidia/nccl/include${CPATH:+:$CPATH}:$site/nvidia/cu13/include
export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE # no wheel that was built against another torch
PATH=$(cd "$(dirname "$python")" && pwd):$PATH # ninja
log=$(mktemp)
say "building $version with $CUDA_HOME, $MAX_JOBS at once; its output goes to $log"
tell() { say "... ${SECONDS} s: $(tail -n 1 "$log" | cut -c 1-100)"; }
every 60 tell
ticker=$!
trap 'kill "$ticker" 2>/dev/null || true' EXIT
"$python" -m pip -v install --disable-pip-version-check --no-deps --no-build-isolation "transformer-engine-torch==$version" \
  >"$log" 2>&1 || { tail -n 30 "$log" >&2; stop "the build failed; all of it is in $log"; }
"$python" -c "import transformer_engine.pytorch" || stop "it was installed, but transformer_engine.pytorch does not load"
say "ready after ${SECONDS} s"
