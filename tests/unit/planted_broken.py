"""A module whose import raises an exception that importers do not expect."""

raise KeyError("planted")
