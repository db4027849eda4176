"""A fault of an engine. SGLang loads it if SGLANG_EXTERNAL_MODEL_PACKAGE names this package."""

# If SGLang can't import a module of this package, it continues with its own model. If this import fails, the server
# ends.
from tests.integration.wrong_recording import models

__all__ = ["models"]
