"""A pytest plugin for a copied tree: imports come from that tree, not from an editable installation."""

import sys

sys.meta_path[:] = [
    finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")
]
