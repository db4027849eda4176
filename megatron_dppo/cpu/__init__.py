"""Stand-ins for a GPU: Megatron-Core without CUDA, layers of torch modules, and SGLang on a CPU (``engine``).

Both sides are found by their entry points (``megatron_dppo.stand_ins`` and ``sglang.srt.platforms`` in pyproject.toml),
so the trainer and the engine do not import this package.
"""
