"""The machine's means of computation: GPUs and their driver, CUDA's toolkit, compilers, and kernels that they build.

SGLang's CUDA server compiles kernels at its start, with ninja and with the toolkit of CUDA_HOME
(sglang/kernels/jit/utils/compile/toolchain.py); Transformer Engine compiles some against its headers. This module
imports torch only to build C++ kernels for CPUs, once for each machine, torch version and source.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia")
LEAST_DRIVER = {12: 525, 13: 580}
"""The oldest driver's major version by CUDA's (CUDA Compatibility, "minor version compatibility")."""
_HIDE = "CUDA_VISIBLE_DEVICES= (empty) leaves them alone on purpose"


def has_visible_gpu() -> bool:
    """Whether the NVIDIA driver shows a GPU that CUDA_VISIBLE_DEVICES does not hide."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(DEVICES.glob("nvidia[0-9]*"))


def driver_version(folder: Path | None = None) -> str | None:
    """Return the version of the loaded kernel module, such as ``580.65.06``; None without one.

    ``folder`` replaces DRIVER.
    """
    path = (folder or DRIVER) / "version"
    if not path.exists():
        return None
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text())
    return match and match.group()


def unusable_gpu(torch_version: str, cuda: str | None) -> str:
    """Return why this torch, which sees no GPU, can't use the visible one: the given and expected value, and a remedy.

    ``cuda`` is the version that torch was built for, such as ``13.0``; None for CPUs.
    """
    if cuda is None:
        requirement = "expected the packages of tools/environment/gpu.txt"
        return f"GPU: torch {torch_version} is built for CPUs alone, {requirement}; {_HIDE}"
    driver = driver_version() or "of unknown version"
    oldest_driver = LEAST_DRIVER.get(int(cuda.partition(".")[0]))
    if (
        oldest_driver is not None
        and driver[0].isdigit()
        and int(driver.partition(".")[0]) >= oldest_driver
    ):
        expected_driver = "one that answers: nvidia-smi says why"
    else:
        expected_driver = f"{oldest_driver} or newer" if oldest_driver else f"one for CUDA {cuda}"
    return (
        f"GPU: torch {torch_version} (CUDA {cuda}) can't use it: got driver {driver}, expected "
        f"{expected_driver}; {_HIDE}"
    )


_SGLANG_DEEP_EP = "sgl-deep-ep"
_HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b", re.IGNORECASE)


def has_megatrons_deep_ep() -> bool:
    """Whether the package ``deep_ep`` of this interpreter is DeepEP's own, not the one that SGLang installs."""
    if importlib.util.find_spec("deep_ep") is None:
        return False
    return not any(importlib.metadata.distributions(name=_SGLANG_DEEP_EP))


def has_hopper(folder: Path | None = None) -> bool:
    """Whether the driver names a GPU of the Hopper generation. ``folder``: in place of DRIVER."""
    files = ((folder or DRIVER) / "gpus").glob("*/information")
    return any(_HOPPER.search(file.read_text()) for file in files)


TERA = 10**12
PEAKS = {
    "H100 PCIe": 756 * TERA,
    "H100 NVL": 835 * TERA,
    "H200 NVL": 835 * TERA,
    "A100": 312 * TERA,
    "H100": 989 * TERA,
    "H200": 989 * TERA,
    "GB200": 2500 * TERA,
    "B200": 2250 * TERA,
}
"""Dense bfloat16 FLOP/s by NVIDIA's data sheets (half of what they tell with sparsity); the longer names first."""
_SHARE = re.compile(r"\bMIG\b", re.IGNORECASE)


def peak_flops(name: str) -> int | None:
    """Dense bf16 FLOP/s of ``name``, e.g. "NVIDIA H100 80GB HBM3"; None for an unknown GPU and for a share
    of one (MIG)."""
    if _SHARE.search(name):
        return None
    for model, peak in PEAKS.items():
        if re.search(rf"\b{model}\b", name, re.IGNORECASE):
            return peak
    return None


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


FLAGS = ["-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"]
X86_FLAGS = ["-mprefer-vector-width=512"]


class KernelBuildError(RuntimeError):
    """The kernels could not be compiled or loaded; the message ends as the compiler's did."""


def cache_directory(source: Path) -> Path:
    """A folder under ``$TORCH_EXTENSIONS_DIR`` or torch's own ``torch_extensions`` in the user's cache
    (``$XDG_CACHE_HOME`` or ``~/.cache``), named after all that the build depends on."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    return Path(root) / f"megatron_dppo_{source.stem}_{_key(source)}"


def build_library(source: Path) -> ctypes.CDLL:
    """The library of ``source``, compiled where the cache has none.

    Raises KernelBuildError where there is no compiler, it fails, or the cache can't be written.
    """
    tools = (os.environ.get("CXX", "g++").split()[0], "ninja")
    path = tool_path(os.environ)
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    if missing:
        raise KernelBuildError(f"not found on PATH: {', '.join(missing)}")
    folder = cache_directory(source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelBuildError(
            f"{folder}: {error.strerror}; name a folder that can be written in TORCH_EXTENSIONS_DIR"
        ) from error
    try:
        with open(folder / "building", "w") as lock:
            # Held by the kernel of the OS, so it ends with its process; torch's own lock file outlives a killed build.
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock").unlink(missing_ok=True)
            library = _compile(source, folder)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        raise KernelBuildError(f"{type(error).__name__}: {str(error)[-2000:]}") from error
    return ctypes.CDLL(str(library))


def _compile(source: Path, folder: Path) -> Path:
    library = folder / f"{source.stem}.so"
    if library.exists():
        return library
    from torch.utils import cpp_extension

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
    # Named last, in one step: a build that was interrupted never looks finished.
    os.replace(folder / f"{source.stem}_build.so", library)
    return library


def _flags() -> list[str]:
    return FLAGS + (X86_FLAGS if platform.machine() == "x86_64" else [])


def _key(source: Path) -> str:
    import torch

    processor = ""
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    parts = [source.read_text(), torch.__version__, platform.machine(), processor, *_flags()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
