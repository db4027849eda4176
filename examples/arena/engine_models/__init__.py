"""Models that SGLang takes in place of its own where SGLANG_EXTERNAL_MODEL_PACKAGE names this package."""

# SGLang goes on with its own models where it can't import one of these; what fails here ends the server.
from examples.arena.engine_models import changed

__all__ = ["changed"]
