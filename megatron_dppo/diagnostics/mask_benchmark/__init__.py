"""``megatron-dppo bench-mask``: what policy statistics and masks cost here, beside other implementations."""
