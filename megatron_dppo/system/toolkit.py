"""This machine's CUDA toolkit, cuDNN and compilers, and the variables that lead libraries to them. Needs no torch.

SGLang's CUDA server compiles kernels at its start with ninja and with the toolkit of CUDA_HOME
(sglang/kernels/jit/utils/compile/toolchain.py). Transformer Engine compiles kernels with the toolkit's headers.
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
    """Return PATH with the interpreter's folder in front: a virtual environment has its ``ninja`` there."""
    return os.pathsep.join([str(Path(python).parent), environment.get("PATH", os.defpath)])


def toolkit_home(environment: Mapping[str, str]) -> Path | None:
    """Return the root folder of CUDA's toolkit; None if it is not found.

    The result is CUDA_HOME or CUDA_PATH if one of them is set, else the folder of the ``nvcc`` on PATH, else
    /usr/local/cuda. The ``nvcc`` on PATH may be a script outside of a toolkit. Therefore a folder that is not set by a
    variable counts only if it has nvcc and the headers. SGLang does not check this.
    """
    configured_home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if configured_home:
        return Path(configured_home)
    candidates = [USUAL_HOME]
    nvcc = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    if nvcc is not None:
        candidates.insert(0, Path(nvcc).resolve().parents[1])
    for candidate in candidates:
        has_compiler = (candidate / "bin/nvcc").is_file()
        has_headers = (candidate / "include/cuda_runtime.h").is_file()
        if has_compiler and has_headers:
            return candidate
    return None


def toolkit_version(home: Path) -> str | None:
    """Return the version of the toolkit's ``nvcc``, for example ``13.0``; None if ``nvcc`` does not run."""
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
    """Set PATH and CUDA_HOME for this process's libraries and child processes.

    Returns the lines for the log: one line about CUDA_HOME.
    """
    environment["PATH"] = tool_path(environment)
    home = toolkit_home(environment)
    if home is None:
        return ["CUDA_HOME is not set: no nvcc on PATH or in /usr/local/cuda"]
    environment["CUDA_HOME"] = str(home)
    return [f"CUDA_HOME={home}"]


def offer_cudnn(environment: MutableMapping[str, str]) -> list[str]:
    """Set CUDNN_HOME for Transformer Engine to the folder of the cuDNN wheel that torch loads.

    Otherwise Transformer Engine would prefer a cuDNN of the system, and two versions together fail at the first
    attention. CUDNN_HOME or CUDNN_PATH of the user is not changed. Returns a line for the log; an empty list if nothing
    was set. Not yet run on a GPU.
    """
    if environment.get("CUDNN_HOME") or environment.get("CUDNN_PATH"):
        return []
    for folder in sys.path:
        home = Path(folder) / "nvidia" / "cudnn"
        if any(home.glob("lib/libcudnn.so*")):
            environment["CUDNN_HOME"] = str(home)
            return [f"CUDNN_HOME={home}"]
    return []
