"""Variables that CUDA and NCCL read, as a trainer rank needs them beside SGLang's servers.

Written from the libraries' sources, not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """An environment variable: the ``value`` that is set where there is none, and why."""

    name: str
    value: str
    why: str


_AS_SGLANG = "SGLang sets it so for its own ranks, and both sides of a weight group must agree"
NEEDED = (
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "Megatron-Core's overlapped communication needs kernels to start in the order of their launch",
    ),
    Variable("NCCL_CUMEM_ENABLE", "0", _AS_SGLANG),
    Variable("NCCL_NVLS_ENABLE", "0", _AS_SGLANG),
)


def complete(environment: MutableMapping[str, str]) -> list[str]:
    """Set what is needed and missing; a line for each variable with its value and who chose it.

    What the user set stays, and is said where it is another value.
    """
    lines = []
    for variable in NEEDED:
        found = environment.setdefault(variable.name, variable.value)
        if found == variable.value:
            lines.append(f"{variable.name}={found}")
        else:
            lines.append(
                f"{variable.name}={found}, as you set it; {variable.value} is usual: {variable.why}"
            )
    return lines
