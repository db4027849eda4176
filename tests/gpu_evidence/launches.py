"""Triton launches on a machine without a GPU: each launch compiles its kernel for a named GPU, and does not run it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.gpu_evidence.inert import CudaMeans

PROGRAMS = Path(nvidia.__file__).parent / "bin"
ACCESS = re.compile(r"\b(LDG|STG|LDL|STL|LDS|STS)\.?([.\w]*)")
WIDTH = re.compile(r"\.?(?:[US]?)(8|16|64|128)\b")


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's machine code.

    Attributes:
        name: name of the kernel.
        warps: warps of a program.
        registers: registers of a thread.
        local_bytes: bytes of a thread's stack and local memory, which hold spilled registers.
        accesses: instruction -> count. For example, ``"LDG.128"`` is a load of 128 bits from global memory.
        divisions: 64-bit divisions and remainders in its PTX.
        narrowings: instructions in its PTX that make a bfloat16 of a float32.
    """

    name: str
    warps: int
    registers: int
    local_bytes: int
    accesses: dict[str, int]
    divisions: int
    narrowings: list[str]


class _NamedGpu:
    """The part of a Triton driver that a compilation needs."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled_for(architecture: int) -> Iterator[list[CompiledKernel]]:
    """Collect every kernel that the block launches, compiled for compute capability ``architecture`` / 10.

    A kernel has the types, alignment, divisibility and options of its launch. An autotuned kernel is compiled with its
    first and its last configuration.
    """
    kernels: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels.append(_examine(kernel))
        return kernel

    def compile_both_ends(self: Autotuner, *args: Any, warmup: bool, **options: Any) -> None:
        self.configs = [self.configs[0], self.configs[-1]]
        self.warmup(*args, **options)

    active = driver._active
    driver.set_active(_NamedGpu(architecture))
    try:
        with (
            mock.patch.object(JITFunction, "run", compile_only),
            mock.patch.object(Autotuner, "run", compile_both_ends),
            CudaMeans("meta"),
        ):
            yield kernels
    finally:
        driver._active = active


def _examine(kernel: triton.compiler.CompiledKernel) -> CompiledKernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _dump(file.name, "-res-usage")
        code = _dump(file.name, "-sass")
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    accesses = Counter[str]()
    for kind, rest in ACCESS.findall(code):
        width = WIDTH.search(rest)
        accesses[f"{kind}.{width[1] if width else 32}"] += 1
    return CompiledKernel(
        name=kernel.metadata.name,
        warps=kernel.metadata.num_warps,
        registers=used["REG"],
        local_bytes=used["STACK"] + used["LOCAL"],
        accesses=dict(accesses),
        divisions=len(re.findall(r"\b(?:div|rem)\.[su]64\b", kernel.asm["ptx"])),
        narrowings=sorted(set(re.findall(r"\bcvt\.\w+\.bf16(?:x2)?\.f32\b", kernel.asm["ptx"]))),
    )


def _dump(path: str, option: str) -> str:
    """Return the output of cuobjdump for the machine code in ``path``."""
    command = [str(PROGRAMS / "cuobjdump"), option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
