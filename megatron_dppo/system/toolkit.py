"""CUDA's toolkit and the compilers of this machine, found and named to libraries. Imports no torch.

SGLang's CUDA server compiles kernels at its start, with ninja and with the toolkit of CUDA_HOME
(sglang/kernels/jit/utils/compile/toolchain.py); Transformer Engine compiles some against its headers.
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
    """Return the root of CUDA's toolkit, with a compiler and its headers; None without one.

    CUDA_HOME or CUDA_PATH count where one is set, else the ``nvcc`` on PATH, else /usr/local/cuda. ``nvcc`` may be a
    link, or a script in a folder without the rest: SGLang would use that folder.
    """
    configured_home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if configured_home:
        return Path(configured_home)
    program = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    candidates = (
        [USUAL_HOME] if program is None else [Path(program).resolve().parents[1], USUAL_HOME]
    )
    parts = ("bin/nvcc", "include/cuda_runtime.h")
    for candidate in candidates:
        if all((candidate / part).is_file() for part in parts):
            return candidate
    return None


def toolkit_version(home: Path) -> str | None:
    """Return the version of its ``nvcc``, such as ``13.0``; None where it does not answer."""
    try:
        done = subprocess.run(
            [str(home / "bin" / "nvcc"), "--version"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
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


def offer_cudnn(environment: MutableMapping[str, str]) -> list[str]:
    """Name the folder of cuDNN's wheel, which torch loads, to Transformer Engine; a line on what was set.

    Transformer Engine loads a system's cuDNN before the wheel's, and libraries of two versions fail at the first
    attention. A user's CUDNN_HOME or CUDNN_PATH stays. Not yet run on a GPU.
    """
    if environment.get("CUDNN_HOME") or environment.get("CUDNN_PATH"):
        return []
    homes = (Path(folder) / "nvidia" / "cudnn" for folder in sys.path)
    home = next((home for home in homes if any(home.glob("lib/libcudnn.so*"))), None)
    if home is None:
        return []
    environment["CUDNN_HOME"] = str(home)
    return [f"CUDNN_HOME={home}"]
