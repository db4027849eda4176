"""``megatron-dppo mismatch``: mean |pi - mu| of a saved batch, by its causes."""
