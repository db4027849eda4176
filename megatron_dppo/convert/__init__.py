"""The command ``convert``: it converts whole checkpoints, merges adapters, and writes a run's adapters for PEFT.

A run reads and writes checkpoints by ``checkpoint_conversion`` and does not import this package.
"""
