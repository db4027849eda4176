"""This machine's CUDA toolkit, cuDNN and compilers, and the variables that lead libraries to them. Needs no torch.

SGLang's CUDA server compiles kernels at its start with ninja and with the toolkit of CUDA_HOME
(sglang/kernels/jit/utils/compile/toolchain.py). Transformer Engine compiles kernels with the toolkit's headers.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from megatron_dppo.system.programs import ProgramError, output_of

USUAL_HOME = Path("/usr/local/cuda")
TORCH_LAYERS_VARIABLE = "MEGATRON_DPPO_TORCH_LAYERS"
"""Variable that leaves Transformer Engine out although it is installed: trainers then use layers of torch modules."""
_TIMEOUT_S = 30.0


def leave_out_transformer_engine(environment: Mapping[str, str]) -> None:
    """Let ``import transformer_engine`` raise ImportError in this process if ``TORCH_LAYERS_VARIABLE`` is set.

    An installed Transformer Engine that cannot be imported would otherwise end trainers and servers: both import
    Megatron-Core, which imports Transformer Engine and catches only ImportError.
    """
    if environment.get(TORCH_LAYERS_VARIABLE):
        sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]


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
        output = output_of([str(home / "bin" / "nvcc"), "--version"], _TIMEOUT_S)
    except ProgramError:
        return None
    release = re.search(r"release (\d+\.\d+)", output)
    return release and release.group(1)


def offer_toolkit(environment: MutableMapping[str, str]) -> list[str]:
    """Set CUDA_HOME for this process's libraries and child processes. Returns the lines for the log."""
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
    for home in _wheel_folders("cudnn"):
        if any(home.glob("lib/libcudnn.so*")):
            environment["CUDNN_HOME"] = str(home)
            return [f"CUDNN_HOME={home}"]
    return []


def load_cudnn(environment: Mapping[str, str]) -> list[str]:
    """Load every part of the cuDNN in CUDNN_HOME or CUDNN_PATH, with symbols that later libraries can use.

    Transformer Engine's library needs parts such as ``libcudnn_graph.so.9``, and has no run path to them. Transformer
    Engine loads ``libcudnn.so.9`` alone if the CUDA toolkit has nvrtc or curand
    (``transformer_engine/common/__init__.py``). Returns a line for the log for each part that does not load. Not yet
    run on a GPU.
    """
    home = environment.get("CUDNN_HOME") or environment.get("CUDNN_PATH")
    if not home:
        return []
    messages = []
    for folder in ("lib", "lib64"):
        for part in sorted(Path(home, folder).glob("libcudnn*.so.[0-9]*")):
            try:
                ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                messages.append(f"cuDNN: {part.name} does not load: {error}")
    return messages


def offer_runtime(environment: MutableMapping[str, str]) -> list[str]:
    """Append the folder of the wheel's CUDA runtime to LD_LIBRARY_PATH, for processes that this process starts.

    SGLang preloads torch_memory_saver's library in the processes of a colocated server. That library needs
    ``libcudart.so`` and has no run path to it. Returns a line for the log; an empty list if the interpreter has no such
    wheel. Not yet run on a GPU.
    """
    for wheel in ("cu13", "cuda_runtime"):
        for home in _wheel_folders(wheel):
            folder = home / "lib"
            if any(folder.glob("libcudart.so.*")):
                earlier_folders = environment.get("LD_LIBRARY_PATH")
                folders = [earlier_folders, str(folder)] if earlier_folders else [str(folder)]
                environment["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
                return [f"LD_LIBRARY_PATH has {folder}"]
    return []


def preload_fault(cuda_major: str) -> str | None:
    """Return why torch_memory_saver's library for CUDA ``cuda_major`` can't be preloaded; None if it can.

    A process without torch loads the library, as the loader does in the processes of a colocated server: torch would
    have loaded the CUDA runtime already.
    """
    pattern = f"torch_memory_saver_hook_mode_preload_cu{cuda_major}*.so"
    libraries = [path for folder in sys.path for path in Path(folder).glob(pattern)]
    if not libraries:
        return f"no {pattern} in the servers' environment"
    environment = dict(os.environ)
    offer_runtime(environment)
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    command = [sys.executable, "-c", program, str(libraries[0])]
    try:
        output_of(command, _TIMEOUT_S, environment=environment)
    except ProgramError as error:
        return str(error)
    return None


def _wheel_folders(name: str) -> Iterator[Path]:
    """Yield this interpreter's folders of NVIDIA's wheel ``name``."""
    for folder in sys.path:
        home = Path(folder) / "nvidia" / name
        if home.is_dir():
            yield home
