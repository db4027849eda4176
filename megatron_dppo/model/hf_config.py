"""config.json as transformers reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dppo.model.errors import ModelConfigError
from megatron_dppo.system.text import single_line


@contextmanager
def refusals_by_transformers(source: str | Path) -> Iterator[None]:
    """Raise a value that transformers refuses for its type as ModelConfigError. ``source``: where the values are."""
    # Import lazily: the module is needed only where transformers is imported too.
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except StrictDataclassError as error:
        reason = single_line(error)
        raise ModelConfigError(f"{source}: transformers refuses it: {reason}") from error


def check_transformers_config(folder: str | Path) -> None:
    """Raise ModelConfigError if transformers refuses the type of a value of the config.json in ``folder``.

    Servers and tokenizers are built from what transformers reads. A model type that transformers does not know, and a
    file that is missing or damaged, are no faults here: others report them.
    """
    from transformers import AutoConfig

    with refusals_by_transformers(Path(folder) / "config.json"):
        try:
            AutoConfig.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return
