"""Stand-ins for a GPU: for ``torch.cuda`` and Transformer Engine's layers in the trainer, and SGLang on a CPU.

The trainer finds its stand-ins by the entry points ``megatron_dppo.stand_ins``, SGLang finds ``engine`` by
``sglang.srt.platforms`` (pyproject.toml). So neither the trainer nor the engine imports this package.
"""
