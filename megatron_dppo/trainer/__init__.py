"""Training on Megatron-Core. Only this package imports Megatron-Core, and only ``platform`` queries CUDA."""

from megatron_dppo.trainer import platform

# Must run before megatron.core is imported: without CUDA its modules are adapted as they load.
platform.prepare()
