"""Compilers that libraries call while a run starts: where they are, and that child processes find them.

SGLang's CUDA server compiles kernels at its start, with ninja and with the toolkit of CUDA_HOME
(sglang/kernels/jit/utils/compile/toolchain.py); Transformer Engine compiles some against its headers. No torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

USUAL_HOME = Path("/usr/local/cuda")
_TIMEOUT_S = 30.0


def tool_path(environment: Mapping[str, str], python: str = sys.executable) -> str:
    """PATH with the interpreter's own folder in front, where ``ninja`` of a virtual environment lies."""
    return os.pathsep.join([str(Path(python).parent), environment.get("PATH", os.defpath)])


def toolkit_home(environment: Mapping[str, str]) -> Path | None:
    """Root of CUDA's toolkit: CUDA_HOME or CUDA_PATH where one is set, else of the ``nvcc`` on PATH, else
    /usr/local/cuda; None where none of these has a compiler and its headers.

    ``nvcc`` may be a link, or a script beside which there is nothing else: SGLang would take that one's folder.
    """
    chosen = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if chosen:
        return Path(chosen)
    program = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    candidates = (
        [USUAL_HOME] if program is None else [Path(program).resolve().parents[1], USUAL_HOME]
    )
    parts = ("bin/nvcc", "include/cuda_runtime.h")
    return next((c for c in candidates if all((c / part).is_file() for part in parts)), None)


def toolkit_version(home: Path) -> str | None:
    """What its ``nvcc`` says, such as ``13.0``; None where it does not answer."""
    try:
        done = subprocess.run(
            [str(home / "bin" / "nvcc"), "--version"],
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release (\d+\.\d+)", done.stdout)
    return release and release.group(1)


def offer_tools(environment: MutableMapping[str, str]) -> list[str]:
    """Set PATH and CUDA_HOME for this process's libraries and children; a line on what was set."""
    environment["PATH"] = tool_path(environment)
    home = toolkit_home(environment)
    if home is None:
        return ["CUDA_HOME is not set: no nvcc on PATH or in /usr/local/cuda"]
    environment["CUDA_HOME"] = str(home)
    return [f"CUDA_HOME={home}"]
