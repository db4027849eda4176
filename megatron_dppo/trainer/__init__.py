"""Training on Megatron-Core. Only this package imports it; only ``platform`` asks for CUDA."""

from megatron_dppo.trainer import platform

# Before any module here imports megatron.core: without CUDA its modules are adapted as they load.
platform.prepare()
