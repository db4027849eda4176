"""Models that replace SGLang's models if SGLANG_EXTERNAL_MODEL_PACKAGE names this package."""

# SGLang skips a module of the package that it can't import, and uses its own models. Import the module here, so that an
# error ends the server.
from examples.arena.engine_models import changed

__all__ = ["changed"]
