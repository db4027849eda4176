"""One folder for each model family. ``shared`` has what several families have in common.

The families are found by their entry points (``megatron_dppo.families`` in pyproject.toml), as those of other packages
are, so no module outside of this folder imports it.
"""
