"""Parts that several families have: rows, readers of config.json."""
