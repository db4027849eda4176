"""Tests of ``megatron_dppo/families/``: a file for each family with parts of its own, and for each shared part."""
