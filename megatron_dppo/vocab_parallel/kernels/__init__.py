"""Kernels of the vocab-parallel statistics: C++ sources and Triton functions."""
