"""``megatron-dppo gpu-check``: what a person runs first on a GPU machine. docs/gpu_check.md"""
