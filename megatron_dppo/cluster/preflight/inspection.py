"""Print the versions of an interpreter's packages and libraries as JSON: ``PYTHON inspection.py PACKAGE...``.

The program runs in any environment, because it imports only the standard library. It does not import torch: that takes
seconds.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def nccl_library() -> str | None:
    """Return the NCCL library that torch will load: the wheel's, else the system's; None without NCCL."""
    for folder in map(Path, sys.path):
        for library in folder.glob("nvidia/nccl/lib/libnccl.so.2"):
            return str(library)
    return ctypes.util.find_library("nccl")


def nccl_version() -> str | None:
    """Return the version that torch's NCCL library reports, e.g. ``2.29.7``; None without a library."""
    path = nccl_library()
    if path is None:
        return None
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        # The library may miss CUDA's runtime, for example.
        return f"unknown: {error}"
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    # 22907 means 2.29.7.
    major, remainder = divmod(number.value, 10000)
    return f"{major}.{remainder // 100}.{remainder % 100}"


_CUDNN_VARIABLES = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")
_USUAL_HOME = "/usr/local/cuda"
_CUDNN_WHEELS = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def cudnn_library(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the cuDNN library that Transformer Engine will load; None without cuDNN.

    The function searches like ``transformer_engine.common._load_cuda_library``: first the variables' folders, then
    ``/usr/local/cuda``, then the loader's own paths. If CUDNN_HOME and CUDNN_PATH are not set, a rank of the trainer
    sets CUDNN_HOME to the wheel's folder, so that this folder comes first.
    """
    homes = [environment.get(name) for name in _CUDNN_VARIABLES]
    if not environment.get("CUDNN_HOME") and not environment.get("CUDNN_PATH"):
        wheels = [str(path) for path in _nvidia_folders("cudnn")]
        homes = [*wheels, *homes]
    for home in filter(None, [*homes, _USUAL_HOME]):
        libraries = [path for path in Path(home).rglob("libcudnn.so*") if "stub" not in str(path)]
        if libraries:
            return str(max(libraries, key=lambda path: path.name))
    return ctypes.util.find_library("cudnn")


def cudnn_version(path: str) -> str:
    """Return the version that the library reports, e.g. ``9.24.0``."""
    try:
        number = ctypes.CDLL(path).cudnnGetVersion()
    except (OSError, AttributeError) as error:
        return f"unknown: {error}"
    # 90200 means 9.2.0; before version 9, 8907 meant 8.9.7.
    scale = 10000 if number >= 90000 else 1000
    major, remainder = divmod(number, scale)
    return f"{major}.{remainder // 100}.{remainder % 100}"


def cudnn() -> dict[str, str | None]:
    """Return ``library``, the cuDNN library that Transformer Engine will load, its ``version``, and ``wheel``.

    ``wheel`` is the version of the cuDNN wheel. torch loads the library of this wheel.
    """
    library = cudnn_library()
    library_version = None if library is None else cudnn_version(library)
    wheel_version = None
    for wheel in _CUDNN_WHEELS:
        full_version = package_version(wheel)
        if full_version is not None:
            # A wheel's version has a fourth part, its build: 9.24.0.43.
            wheel_version = ".".join(full_version.split(".")[:3])
            break
    return {"library": library, "version": library_version, "wheel": wheel_version}


def _nvidia_folders(name: str) -> Iterator[Path]:
    for folder in map(Path, sys.path):
        home = folder / "nvidia" / name
        if home.is_dir():
            yield home


def torch_cuda() -> str | None:
    """Return the version of CUDA that torch was built for, e.g. ``13.0``; None if torch is for CPUs, or missing."""
    for folder in map(Path, sys.path):
        path = folder / "torch" / "version.py"
        if path.is_file():
            line = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)", path.read_text(), re.MULTILINE)
            return None if line is None else line.group(1)
    return None


def fused_weight_gradients() -> str:
    """Return whose kernels accumulate weight gradients in fp32: Transformer Engine's, else apex's."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return "Transformer Engine's"
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None:
        return "apex's"
    return "not built"


def transformer_engine_fault() -> str | None:
    """Return what an installed Transformer Engine lacks; None if it is complete, or not installed.

    ``make setup GPU=1`` compiles the extension after it has installed the Python package. SGLang imports Megatron-Core
    and with it Transformer Engine, so a package without its extension ends servers too.
    """
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    # Transformer Engine looks for the extension in these folders.
    folders = {package.parent, package, package / "wheel_lib", Path(sysconfig.get_path("purelib"))}
    for folder in folders:
        if any(folder.glob("transformer_engine_torch*.so")):
            return None
    return (
        f"Transformer Engine in {package} has no transformer_engine_torch*.so, its extension for torch: run make setup "
        f"GPU=1 to its end, or uninstall transformer-engine"
    )


def missing_for_triton() -> list[str]:
    """Return what Triton lacks, a compiler or a header: Triton compiles a launcher in C for each kernel."""
    compilers = (os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing_tools = []
    if not any(compilers):
        missing_tools.append("gcc, clang or CC")
    if not header.is_file():
        missing_tools.append(str(header))
    return missing_tools


if __name__ == "__main__":
    answer = {
        "version": platform.python_version(),
        "packages": {name: package_version(name) for name in sys.argv[1:]},
        "nccl": nccl_version(),
        "cudnn": cudnn(),
        "cuda": torch_cuda(),
        "fused_weight_gradients": fused_weight_gradients(),
        "missing_for_triton": missing_for_triton(),
        "transformer_engine": transformer_engine_fault(),
    }
    print(json.dumps(answer))
