"""Hugging Face <-> Megatron-Core: one table a model family, for loading, saving, updating and proving."""
