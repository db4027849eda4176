"""``megatron-dppo explain``: what the mask of a saved batch blocks, token by token, and why."""
