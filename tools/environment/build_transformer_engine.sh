#!/usr/bin/env bash
# Builds transformer-engine-torch from source against the installed torch; `make setup GPU=1` calls it. PyPI has only the source,
# whose metadata requires transformer-engine-cu12 for every CUDA: so it is installed without its requirements. With --variables,
# the script builds nothing and prints the variables that the build of another installer needs, for `eval` (docs/environment.md: uv).
# PYTHON: the environment's interpreter (.venv/bin/python). MAX_JOBS: number of compilers that run at the same time (default: one
# a core, and at most one for each 4 GB of free memory).
# Not yet run on a GPU machine.
set -euo pipefail
cd "$(dirname "$0")/../.."
say() { printf '[transformer engine] %s\n' "$*"; }
stop() { say "$*" >&2; exit 1; }
. tools/environment/cuda_build.sh
version=$(sed -n 's/^transformer-engine==//p' tools/environment/gpu.txt)

torch_cuda "Transformer Engine"
if [ "${1:-}" != --variables ] && [ "$("$python" -c 'from importlib.metadata import version; print(version("transformer-engine-torch"))' 2>/dev/null)" = "$version" ]; then
  say "$version is there already"
  exit 0
fi
find_toolkit
[ "${found%%.*}" = "${wanted%%.*}" ] || stop "torch is built for CUDA $wanted; $CUDA_HOME has $found"
command -v g++ >/dev/null || stop "no g++ here"

# cuDNN's and NCCL's headers come with torch's own libraries, outside of the toolkit.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for package in cudnn nccl; do
  [ -d "$site/nvidia/$package/include" ] || stop "no headers in $site/nvidia/$package/include: install tools/environment/gpu.txt first"
done
jobs=$(($(awk '/MemAvailable/ {print $2}' /proc/meminfo) / 4000000))
jobs=$((jobs < 1 ? 1 : jobs > $(nproc) ? $(nproc) : jobs))
export MAX_JOBS=${MAX_JOBS:-$jobs}
# The last folder has headers such as cusparse.h, which a toolkit without the libraries lacks.
export CPATH=$site/nvidia/cudnn/include:$site/nvidia/nccl/include${CPATH:+:$CPATH}:$site/nvidia/cu13/include
export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE # no wheel that was built against another torch
PATH=$(cd "$(dirname "$python")" && pwd):$PATH # ninja
if [ "${1:-}" = --variables ]; then
  for name in CUDA_HOME MAX_JOBS CPATH NVTE_FRAMEWORK NVTE_PYTORCH_FORCE_BUILD PATH; do
    printf 'export %s=%q\n' "$name" "${!name}"
  done
  exit 0
fi
build transformer_engine.pytorch "transformer-engine-torch==$version"
