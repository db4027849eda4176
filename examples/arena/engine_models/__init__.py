"""Models that replace SGLang's models if SGLANG_EXTERNAL_MODEL_PACKAGE names this package."""

# If SGLang can't import a module of the package, it uses its own models. An error of this import ends the server.
from examples.arena.engine_models import changed

__all__ = ["changed"]
