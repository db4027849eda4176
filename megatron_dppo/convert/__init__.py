"""The command ``convert``: whole checkpoints from one format to another, and adapters merged into their base.

A run reads and writes single formats (``checkpoint_conversion``) and does not import this package.
"""
