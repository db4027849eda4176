"""CUDA's toolkit, with which SGLang compiles kernels at its start: by compiling one as it does."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.preflight.checks.base import Site
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import Finding
from megatron_dppo.preflight.needs import Needs
from megatron_dppo.system.compute import (
    LEAST_DRIVER,
    driver_version,
    tool_path,
    toolkit_home,
    toolkit_version,
)

_TIMEOUT_S = 120.0
# The first header refuses an nvcc of another version than the toolkit's headers: the wheels' are 13.5 and 13.0.
_KERNEL = """\
#include <cuda/std/version>
#include <cuda_bf16.h>
__global__ void rounded(float* x) { *x = __bfloat162float(__float2bfloat16(*x)); }
extern "C" int launch(float* x) { rounded<<<1, 1>>>(x); return cudaGetLastError(); }
"""


def collect(site: Site) -> dict[str, Any]:
    """As :func:`toolkit_here`, where a server of the run is on GPUs."""
    python = site.needs.pythons.get("engine")
    if not site.needs.gpus or python is None:
        return {"skipped": "no server of this run compiles for a GPU"}
    built_for = site.told.get("pythons", {}).get("engine", {}).get("cuda")
    return toolkit_here(python, built_for)


def toolkit_here(python: str, cuda: str | None) -> dict[str, Any]:
    """``home``, ``version``, ``ninja``, ``driver``, and ``failed``: the compiler's last word, None where it compiled.

    ``python``: the interpreter of the servers. ``cuda``: what its torch was built for.
    """
    environment = os.environ
    path = tool_path(environment, python)
    home = toolkit_home(environment)
    told: dict[str, Any] = {
        "ninja": shutil.which("ninja", path=path),
        "driver": driver_version(),
        "cuda": cuda,
    }
    if home is None:
        return {**told, "home": None, "version": None, "failed": None}
    version = toolkit_version(home)
    failed = _compile(home, {**environment, "PATH": path}) if version else None
    return {**told, "home": str(home), "version": version, "failed": failed}


def _compile(home: Path, environment: Mapping[str, str]) -> str | None:
    """Compile and link one kernel as SGLang's ninja files do; the end of what failed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.cu").write_text(_KERNEL)
        nvcc = [str(home / "bin" / "nvcc"), "-std=c++20", "-Xcompiler", "-fPIC"]
        link = [environment.get("CXX", "c++"), "kernel.o", "-shared", f"-L{home}/lib64", "-lcudart"]
        for command in ([*nvcc, "-c", "kernel.cu", "-o", "kernel.o"], [*link, "-o", "kernel.so"]):
            try:
                done = subprocess.run(
                    command, cwd=folder, env=dict(environment), timeout=_TIMEOUT_S, check=False,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )  # fmt: skip
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
            if done.returncode:
                lines = [line for line in done.stdout.splitlines() if "error" in line]
                said = (lines or done.stdout.splitlines()[-1:] or ["nothing"])[0]
                return f"{Path(command[0]).name} exits with code {done.returncode}: {said[:300]}"
    return None


def judge(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """A driver and a toolkit of the version that torch was built for, which compile, and ninja."""
    for host, told in evidence.items():
        if "skipped" not in told:
            yield from toolkit_findings(host, told)


def toolkit_findings(host: str, told: Evidence) -> Iterator[Finding]:
    """Of one node."""
    yield from _driver(host, told)
    yield from _toolkit(host, told)
    if told["ninja"] is None:
        expected = "in the servers' environment, or on PATH: SGLang builds kernels with it"
        yield Finding(host, "ninja", "none", expected)


def _driver(host: str, told: Evidence) -> Iterator[Finding]:
    driver, cuda = told["driver"], told["cuda"]
    least = LEAST_DRIVER.get(int(cuda.partition(".")[0])) if cuda else None
    if driver and least and int(driver.partition(".")[0]) < least:
        yield Finding(host, "driver", driver, f"{least} or newer, for torch's CUDA {cuda}")


def _toolkit(host: str, told: Evidence) -> Iterator[Finding]:
    what, cuda = "CUDA toolkit", told["cuda"]
    major = cuda.partition(".")[0] if cuda else None
    expected = f"nvcc and headers of CUDA {major or '13'}: SGLang compiles kernels at its start"
    home, version = told["home"], told["version"]
    if home is None:
        yield Finding(host, what, "no CUDA_HOME, no nvcc on PATH, no /usr/local/cuda", expected)
    elif version is None:
        yield Finding(host, what, f"no answer of {home}/bin/nvcc", expected)
    elif major and version.partition(".")[0] != major:
        yield Finding(host, what, f"{version} in {home}", f"{major}, as torch's CUDA {cuda}")
    elif told["failed"] is not None:
        yield Finding(host, f"compiling with {home}", told["failed"], "a library of one kernel")
