"""The project's own tools and examples, as a part runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from megatron_dppo.gpu_check.part import ROOT, LackingError


def require(*names: str) -> None:
    """Raise LackingError where a file or folder of the project is not there: an installed package comes without tools
    and examples."""
    for name in names:
        if not (ROOT / name).exists():
            raise LackingError(f"{name} is not in {ROOT}: run this in the project's folder")


def run_python(arguments: Sequence[str], needs: Sequence[str] = ()) -> int:
    """Run this Python in the project's folder, its output in the part's log; the exit code.

    Args:
        arguments: a script of the project, or ``-m`` and a module, and what follows.
        needs: as ``require`` takes them.
    """
    require(*needs)
    print(" ".join(["python", *arguments]), flush=True)
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode


def must_run(arguments: Sequence[str], needs: Sequence[str] = ()) -> None:
    """As ``run_python``. Raises RuntimeError for an exit code other than 0."""
    if code := run_python(arguments, needs):
        raise RuntimeError(f"python {' '.join(arguments)} ended with exit code {code}")
