"""``megatron-dppo doctor``: why the probabilities of engine and trainer differ in a saved batch."""
