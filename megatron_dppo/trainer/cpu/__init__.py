"""Megatron-Core without CUDA: what replaces the GPU's runtime and Transformer Engine.

Imported by trainer/platform.py alone.
"""
