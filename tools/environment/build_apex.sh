#!/usr/bin/env bash
# Builds NVIDIA's apex from source for its kernel that accumulates weight gradients in fp32
# (fused_weight_gradient_mlp_cuda), which Megatron-Core uses where it is there. Optional: 20 to 30 minutes, once for an
# environment; on all nodes or on none, for the numbers differ (the preflight refuses a mixture).
# PYTHON: the environment's interpreter (.venv/bin/python). MAX_JOBS, TORCH_CUDA_ARCH_LIST (9.0): as torch reads them.
# Not yet run on a GPU machine. The package named apex on PyPI is another project.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4
module=fused_weight_gradient_mlp_cuda
python=${PYTHON:-.venv/bin/python}
say() { printf '[apex] %s\n' "$*"; }
stop() { say "$*" >&2; exit 1; }
. tools/environment/progress.sh

wanted=$("$python" -c 'import torch; print(torch.version.cuda or "")') || stop "$python has no torch; set PYTHON"
[ -n "$wanted" ] || stop "the torch of $python is built for CPUs; apex needs the packages of tools/environment/gpu.txt"
if "$python" -c "import torch, $module" 2>/dev/null; then
  say "$module is there already"
  exit 0
fi
CUDA_HOME=$("$python" -c 'import os; from megatron_dppo.system.compute import toolkit_home; print(toolkit_home(os.environ) or "")')
[ -n "$CUDA_HOME" ] || stop "no CUDA toolkit: no CUDA_HOME, no nvcc on PATH, no /usr/local/cuda"
found=$("$CUDA_HOME/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
[ "$found" = "$wanted" ] || stop "apex asks for torch's own CUDA, $wanted; $CUDA_HOME has $found"
command -v git >/dev/null || stop "no git here"

export CUDA_HOME TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} NVCC_APPEND_FLAGS=${NVCC_APPEND_FLAGS:---threads 4}
log=$(mktemp)
say "building $commit with $CUDA_HOME; its output goes to $log"
tell() { say "... ${SECONDS} s: $(tail -n 1 "$log" | cut -c 1-100)"; }
every 60 tell
ticker=$!
trap 'kill "$ticker" 2>/dev/null || true' EXIT
"$python" -m pip -v install --disable-pip-version-check --no-deps --no-build-isolation \
  --config-settings "--build-option=--cpp_ext --cuda_ext --parallel ${MAX_JOBS:-8}" \
  "apex @ git+https://github.com/NVIDIA/apex.git@$commit" >"$log" 2>&1 ||
  { tail -n 30 "$log" >&2; stop "the build failed; all of it is in $log"; }
"$python" -c "import torch, $module" || stop "apex was installed, but $module does not load"
say "ready after ${SECONDS} s"
