"""Parts that a team adds to megatron_dppo; pyproject.toml registers them as entry points."""
