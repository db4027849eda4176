"""The project's own commands, as a part runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def run_command(words: Sequence[str]) -> int:
    """Run ``megatron-dppo`` with ``words``, its output in the part's log; the exit code."""
    print(" ".join(["megatron-dppo", *words]), flush=True)
    return subprocess.run([sys.executable, "-m", "megatron_dppo", *words], check=False).returncode


def must_run(words: Sequence[str]) -> None:
    """As ``run_command``. Raises RuntimeError for an exit code other than 0."""
    if code := run_command(words):
        raise RuntimeError(f"megatron-dppo {' '.join(words)} ended with exit code {code}")
