"""The check of the CUDA toolkit. SGLang compiles kernels when it starts, so the check compiles a kernel too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.cluster.preflight.evidence import (
    CheckError,
    Evidence,
    EvidenceByHost,
    Finding,
    Needs,
    Site,
)
from megatron_dppo.cluster.preflight.machine import inspect_python
from megatron_dppo.config import TrainConfig
from megatron_dppo.config.machine import Machine
from megatron_dppo.config.schema import EngineConfig
from megatron_dppo.launch.start_checks import StartCheck
from megatron_dppo.spec import Roles
from megatron_dppo.system import gpus
from megatron_dppo.system import toolkit as cuda_toolkit
from megatron_dppo.system.programs import ProgramError, output_of

_COMPILE_S = 120.0


# ``cuda/std/version`` rejects an nvcc whose version differs from the version of the toolkit's headers. For example, one
# wheel may have nvcc 13.5, and another wheel the headers of CUDA 13.0.
_KERNEL = """\
#include <cuda/std/version>
#include <cuda_bf16.h>
__global__ void rounded(float* x) { *x = __bfloat162float(__float2bfloat16(*x)); }
extern "C" int launch(float* x) { rounded<<<1, 1>>>(x); return cudaGetLastError(); }
"""


def collect_toolkit(site: Site) -> dict[str, Any]:
    """Collect the result of :func:`toolkit_here` if a server of the run uses GPUs."""
    python = site.needs.pythons.get("engine")
    if not site.needs.gpus or python is None:
        return {"skipped": "no server of this run compiles for a GPU"}
    torch_cuda = site.evidence.get("pythons", {}).get("engine", {}).get("cuda")
    return toolkit_here(python, torch_cuda, memory_saver=site.needs.memory_saver)


def toolkit_here(
    python: str, torch_cuda: str | None, *, memory_saver: bool = False
) -> dict[str, Any]:
    """Return the tools with which a server on this machine would compile kernels.

    Args:
        python: the interpreter of the servers.
        torch_cuda: the version of CUDA that the interpreter's torch was built for.
        memory_saver: whether the servers will preload torch_memory_saver's library.

    Returns:
        ``home`` and ``version`` of the toolkit, ``ninja``'s path, the ``driver``'s version, ``cuda`` (``torch_cuda``),
        ``failed``, the first error of the compilation, and ``preload``, the error of preloading torch_memory_saver's
        library. A missing tool or version is None. ``failed`` is None if the compilation succeeds, and if nothing can
        be compiled without ``home`` and ``version``. ``preload`` is None if the library loads or is not needed.
    """
    path = cuda_toolkit.tool_path(os.environ, python)
    home = cuda_toolkit.toolkit_home(os.environ)
    version = None if home is None else cuda_toolkit.toolkit_version(home)
    failed = None
    if home is not None and version:
        failed = _compile(home, {**os.environ, "PATH": path})
    preload = None
    if memory_saver and torch_cuda is not None:
        preload = _preload(python, torch_cuda.partition(".")[0])
    return {
        "ninja": shutil.which("ninja", path=path),
        "driver": gpus.driver_version(),
        "cuda": torch_cuda,
        "home": None if home is None else str(home),
        "version": version,
        "failed": failed,
        "preload": preload,
    }


_PRELOAD = "import sys; from megatron_dppo.system import toolkit; print(toolkit.preload_fault(sys.argv[1]) or '')"


def _preload(python: str, cuda_major: str) -> str | None:
    """Return :func:`megatron_dppo.system.toolkit.preload_fault` of the servers' interpreter."""
    try:
        return output_of([python, "-c", _PRELOAD, cuda_major], _COMPILE_S).strip() or None
    except ProgramError as error:
        return str(error)


def _compile(home: Path, environment: Mapping[str, str]) -> str | None:
    """Compile and link one kernel as SGLang's ninja files do; return the first error, or None."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.cu").write_text(_KERNEL)
        nvcc = [str(home / "bin" / "nvcc"), "-std=c++20", "-Xcompiler", "-fPIC"]
        link = [environment.get("CXX", "c++"), "kernel.o", "-shared", f"-L{home}/lib64", "-lcudart"]
        for command in ([*nvcc, "-c", "kernel.cu", "-o", "kernel.o"], [*link, "-o", "kernel.so"]):
            try:
                completed = subprocess.run(
                    command,
                    cwd=folder,
                    env=dict(environment),
                    timeout=_COMPILE_S,
                    check=False,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
            if completed.returncode:
                output = completed.stdout.splitlines()
                errors = [line for line in output if "error" in line]
                # Show the first error, because later errors follow from it. Without an error, show the last line.
                shown_lines = errors or output[-1:] or ["nothing"]
                program = Path(command[0]).name
                return f"{program} exits with code {completed.returncode}: {shown_lines[0][:300]}"
    return None


def judge_toolkit(evidence: EvidenceByHost, needs: Needs) -> Iterator[Finding]:
    """Report a driver or toolkit that does not fit torch's CUDA version, a failed compilation, and missing ninja."""
    for host, entry in evidence.items():
        if "skipped" not in entry:
            yield from toolkit_findings(host, entry)


def toolkit_findings(host: str, entry: Evidence) -> Iterator[Finding]:
    """Yield the findings about ``entry``, the result of ``toolkit_here`` on one machine."""
    driver, torch_cuda = entry["driver"], entry["cuda"]
    major = torch_cuda.partition(".")[0] if torch_cuda else None
    oldest_driver = None
    if major:
        oldest_driver = gpus.LEAST_DRIVER.get(int(major))
    if driver and oldest_driver and int(driver.partition(".")[0]) < oldest_driver:
        expected_driver = f"{oldest_driver} or newer, for torch's CUDA {torch_cuda}"
        yield Finding(host, "driver", driver, expected_driver)
    subject = "CUDA toolkit"
    home = entry["home"]
    version = entry["version"]
    expectation = f"nvcc and headers of CUDA {major or '13'}: SGLang compiles kernels at its start"
    if home is None:
        yield Finding(
            host, subject, "no CUDA_HOME, no nvcc on PATH, no /usr/local/cuda", expectation
        )
    elif version is None:
        yield Finding(host, subject, f"no answer of {home}/bin/nvcc", expectation)
    elif major and version.partition(".")[0] != major:
        expected_version = f"{major}, as torch's CUDA {torch_cuda}"
        yield Finding(host, subject, f"{version} in {home}", expected_version)
    elif entry["failed"] is not None:
        yield Finding(host, f"compiling with {home}", entry["failed"], "a library of one kernel")
    if entry["preload"] is not None:
        expectation = "a library that loads without torch: colocated servers preload it"
        yield Finding(host, "torch_memory_saver", entry["preload"], expectation)
    if entry["ninja"] is None:
        expectation = "in the servers' environment, or on PATH: SGLang builds kernels with it"
        yield Finding(host, "ninja", "none", expectation)


def check_compiler(config: TrainConfig, machine: Machine) -> StartCheck:
    """Start check: a server that starts on this machine's GPUs must be able to compile its kernels."""
    if not Roles.of(config).servers:
        return StartCheck(())
    return StartCheck(list(compiler_faults(config.engine)))


def compiler_faults(engine: EngineConfig) -> Iterator[str]:
    """Yield the reasons why a server on this machine's GPUs could not compile its kernels.

    Yields nothing on a machine without GPUs: preflight checks the nodes where the servers will run.
    """
    if engine.device == "cpu" or not gpus.has_visible_gpu():
        return
    python = engine.python or sys.executable
    try:
        inspection = inspect_python(python)
    except CheckError as error:
        yield f"engine.python: {error}"
        return
    memory_saver = engine.placement == "colocated"
    toolkit = toolkit_here(python, inspection["cuda"], memory_saver=memory_saver)
    if inspection["transformer_engine"] is not None:
        yield f"engine.python: {inspection['transformer_engine']}"
    yield from map(str, toolkit_findings("this machine", toolkit))
