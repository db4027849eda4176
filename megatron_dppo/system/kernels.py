"""C++ kernels for CPUs. torch compiles them once for each kind of processor, torch version and source."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from megatron_dppo.system.toolkit import tool_path

FLAGS = ["-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"]
X86_FLAGS = ["-mprefer-vector-width=512"]


class KernelBuildError(RuntimeError):
    """The kernels could not be compiled or loaded; the message ends with the compiler's output, if there is one."""


def cache_directory(source: Path) -> Path:
    """Return the folder of a build. Its name has a hash of everything that the build depends on.

    The folder is in ``$TORCH_EXTENSIONS_DIR``, by default torch's ``torch_extensions`` in the user's cache
    (``$XDG_CACHE_HOME``, by default ``~/.cache``).
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    return Path(root) / f"megatron_dppo_{source.stem}_{_build_hash(source)}"


def build_library(source: Path) -> ctypes.CDLL:
    """Load the compiled library of ``source``; compile it if the cache does not have it.

    Raises KernelBuildError if a compiler is missing or fails, or if the cache can't be written.
    """
    tools = (_compiler().split()[0], "ninja")
    path = tool_path(os.environ)
    missing_tools = [tool for tool in tools if shutil.which(tool, path=path) is None]
    if missing_tools:
        raise KernelBuildError(f"not found on PATH: {', '.join(missing_tools)}")
    folder = cache_directory(source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelBuildError(
            f"{folder}: {error.strerror}; name a folder that can be written in TORCH_EXTENSIONS_DIR"
        ) from error
    try:
        with open(folder / "building", "w") as lock:
            # The operating system releases this lock when the process that holds the lock ends.
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Torch's own lock file stays after a killed build, and later builds would wait for its removal forever.
            (folder / "lock").unlink(missing_ok=True)
            return ctypes.CDLL(str(_compile(source, folder)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        raise KernelBuildError(f"{type(error).__name__}: {str(error)[-2000:]}") from error


def _compile(source: Path, folder: Path) -> Path:
    library = folder / f"{source.stem}.so"
    if library.exists():
        return library
    from torch.utils import cpp_extension

    # torch looks for ninja on PATH.
    path = os.environ.get("PATH")
    os.environ["PATH"] = tool_path(os.environ)
    try:
        cpp_extension.load(
            f"{source.stem}_build",
            [str(source)],
            extra_cflags=_flags(),
            build_directory=str(folder),
            is_python_module=False,
        )
    finally:
        os.environ["PATH"] = os.defpath if path is None else path
    # Rename the library at the end, so that an interrupted build never looks finished.
    os.replace(folder / f"{source.stem}_build.so", library)
    return library


def _flags() -> list[str]:
    if platform.machine() == "x86_64":
        return FLAGS + X86_FLAGS
    return FLAGS


def _compiler() -> str:
    """Return the command that torch compiles with."""
    return os.environ.get("CXX", "g++")


def _build_hash(source: Path) -> str:
    """Return a hash of source, torch's version, compiler, processor with its instruction sets, and flags."""
    import torch

    instruction_sets = ""
    if os.path.exists("/proc/cpuinfo"):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            # The line is called flags on x86 and Features on ARM.
            if line.startswith(("flags", "Features")):
                instruction_sets = line
                break
    processor = (platform.machine(), instruction_sets)
    parts = [source.read_text(), torch.__version__, _compiler(), *processor, *_flags()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
