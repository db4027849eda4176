"""Megatron-Core without CUDA: replacements of the CUDA runtime and of Transformer Engine's layers.

Imported only by trainer/platform.py.
"""
