"""What a weight update runs in a server's processes. Each module changes SGLang by its hooks (``engine.server``)."""
