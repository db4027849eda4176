"""Checkpoint conversion between Hugging Face and Megatron-Core, from one table for each model family."""
