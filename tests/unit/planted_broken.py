"""A module that fails while it is imported, with what no importer expects."""

raise KeyError("planted")
