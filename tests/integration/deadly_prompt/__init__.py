"""A fault of an engine, as SGLang loads it where SGLANG_EXTERNAL_MODEL_PACKAGE names this package."""

# SGLang goes on with its own models where it can't import one of these; what fails here ends the server.
from tests.integration.deadly_prompt import models

__all__ = ["models"]
