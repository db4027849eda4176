#!/usr/bin/env bash
# Builds NVIDIA's apex from source. If apex is installed, Megatron-Core uses its kernel that accumulates weight gradients in
# fp32 (fused_weight_gradient_mlp_cuda). Optional: the build takes 20 to 30 minutes, once for an environment. Install it on all nodes or on none, because the results differ (the preflight refuses a mixture).
# PYTHON: the environment's interpreter (.venv/bin/python). MAX_JOBS, TORCH_CUDA_ARCH_LIST (9.0): as torch reads them.
# Not yet run on a GPU machine. The package named apex on PyPI is another project.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4
module=fused_weight_gradient_mlp_cuda
say() { printf '[apex] %s\n' "$*"; }
stop() { say "$*" >&2; exit 1; }
. tools/environment/cuda_build.sh

torch_cuda apex
if "$python" -c "import torch, $module" 2>/dev/null; then
  say "$module is there already"
  exit 0
fi
find_toolkit
[ "$found" = "$wanted" ] || stop "apex asks for torch's own CUDA, $wanted; $CUDA_HOME has $found"
command -v git >/dev/null || stop "no git here"

export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} NVCC_APPEND_FLAGS=${NVCC_APPEND_FLAGS:---threads 4}
build "$module" --config-settings "--build-option=--cpp_ext --cuda_ext --parallel ${MAX_JOBS:-8}" \
  "apex @ git+https://github.com/NVIDIA/apex.git@$commit"
