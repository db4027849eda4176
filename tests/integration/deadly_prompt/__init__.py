"""A fault of an engine. SGLang loads it if SGLANG_EXTERNAL_MODEL_PACKAGE names this package."""

# Import the module here. SGLang skips a module that it can't import, and continues with its own model. It does not
# start if the import of the package fails.
from tests.integration.deadly_prompt import models

__all__ = ["models"]
