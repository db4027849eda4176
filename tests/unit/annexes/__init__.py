"""Tests of the annexes ``megatron_dppo/cluster/`` and ``megatron_dppo/diagnostics/``."""
