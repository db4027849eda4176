"""``megatron-dppo doctor``: which cause makes the probabilities of engine and trainer differ in a saved batch."""
