"""Why the supervisor refuses to start, or gives a run up."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """The run can't start here and now; the message says what to do about it."""
