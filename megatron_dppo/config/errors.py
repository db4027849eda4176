"""The one error of this package: everything that is wrong with a configuration, at once."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dppo.system.errors import RunError

MOST_SHOWN = 14
"""Problems in a message: as many as a screen holds."""


class ConfigError(RunError, ValueError):
    """A configuration that can't be run. ``problems``: one line for each, key first; ``source``:
    the file."""

    def __init__(self, problems: Sequence[str], source: str = "configuration") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = f" {len(self.problems)} problems" if len(self.problems) > 1 else ""
        shown = self.problems[:MOST_SHOWN]
        more = [f"and {len(problems) - len(shown)} more"] if len(shown) < len(problems) else []
        super().__init__("\n  ".join([f"{source}:{count}", *shown, *more]))
