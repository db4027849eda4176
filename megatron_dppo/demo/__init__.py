"""``megatron-dppo demo``: a tiny mixture of experts learns by DPPO on this machine; see examples/tiny_moe/README.md."""
