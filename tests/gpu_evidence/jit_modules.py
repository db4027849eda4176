"""SGLang's kernels that it compiles with nvcc at a server's start, built for an H100 on a machine without one.

python -m tests.gpu_evidence.jit_modules NAME FOLDER    # build a module of MODULES into FOLDER, print its functions
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping

OPS = "sglang.kernels.ops"
HEAD = 128
MODULES: Mapping[str, tuple[str, tuple[object, ...], tuple[str, ...]]] = {
    # Qwen3-30B-A3B at TP4: one key-value head of 128 in bfloat16.
    "kvcache": ("kvcache.kvcache:_jit_kvcache_module", (2 * HEAD, 2 * HEAD, 0), ("store_cache",)),
    "rmsnorm": ("layernorm.norm:_jit_rmsnorm_module", (2048, "bfloat16"), ("rmsnorm",)),
    "fused_add_rmsnorm": (
        "layernorm.norm:_jit_fused_add_rmsnorm_module",
        ("bfloat16", False),
        ("fused_add_rmsnorm",),
    ),
    "qknorm": ("layernorm.norm:_jit_qknorm_module", (HEAD, "bfloat16"), ("qknorm",)),
    "rope": (
        "attention.rope:_jit_fused_rope_module",
        (True, HEAD, "bfloat16", "bfloat16"),
        ("run_rope", "run_rope_store"),
    ),
    "rotary_embedding": ("attention.rope:_jit_rotary_embedding_module", (), ("rotary_embedding",)),
}
"""Name -> SGLang's function that builds the module, its arguments at the shapes of the recipes, and the functions that
the server calls."""


def main() -> None:
    """Build a module with this machine's toolkit and load it."""
    name, folder = sys.argv[1:]
    from megatron_dppo.system.toolkit import offer_toolkit, tool_path

    os.environ["PATH"] = tool_path(os.environ)
    offer_toolkit(os.environ)
    os.environ["SGLANG_JIT_CACHE_DIR"] = folder
    import torch
    from sglang.kernels.jit.utils import override_jit_cuda_arch

    place, arguments, functions = MODULES[name]
    module_name, function = place.split(":")
    values = [getattr(torch, v) if isinstance(v, str) else v for v in arguments]
    with override_jit_cuda_arch(9, 0):
        built = getattr(importlib.import_module(f"{OPS}.{module_name}"), function)(*values)
    print(json.dumps([callable(getattr(built, name)) for name in functions]))


if __name__ == "__main__":
    main()
