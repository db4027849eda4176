"""Settings that depend on the machine; the only module that queries whether CUDA is available.

With CUDA, training uses NCCL and Megatron-Core's Transformer Engine layers; if Transformer Engine is not installed, it
uses slower layers of torch modules with the same parameter names. Without CUDA, training uses the layers of torch
modules, gloo, and a shim in place of torch.cuda.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import random
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dppo.model.layout import LayoutFault, LayoutSizes
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system import gpus, plugins, toolkit
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.scratch import FileBuffer


@dataclass(frozen=True)
class Variable:
    """An environment variable, the ``value`` that it gets if the user has not set it, and the reason for this value."""

    name: str
    value: str
    reason: str


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
"""The variables that a rank on a GPU needs."""


def set_missing_variables(environment: MutableMapping[str, str]) -> list[str]:
    """Set the variables of ``NEEDED`` that are missing; return a line about each.

    A value of the user is kept. If this value is not ``Variable.value``, the line says so.
    """
    lines = []
    for variable in NEEDED:
        value = environment.setdefault(variable.name, variable.value)
        if value == variable.value:
            lines.append(f"{variable.name}={value}")
        else:
            lines.append(
                f"{variable.name}={value}, as you set it; {variable.value} is usual: {variable.reason}"
            )
    return lines


log = logging.getLogger(__name__)
_environment_lines: list[str] = []
"""The lines that ``environment_lines`` returns. ``prepare`` adds them."""
_WGRAD_LINES: Mapping[str | None, str] = {
    "apex": "weight gradients: accumulated in fp32 by apex's kernel",
    "Transformer Engine": "weight gradients: accumulated in fp32 by Transformer Engine's layers",
    None: "weight gradients: rounded to the weights' type in each micro-batch; neither Transformer Engine nor apex's "
    "kernel is there (tools/environment/build_apex.sh)",
}
_TORCH_LAYERS_LINE = (
    "layers: of torch modules, slower than Transformer Engine's, which is not installed or left out by "
    f"{toolkit.TORCH_LAYERS_VARIABLE} (docs/environment.md)"
)


class UnusableGpuError(RunError):
    """The machine has a GPU that torch can't use: training would silently run on CPUs."""


@dataclass(frozen=True)
class Platform:
    """Settings of one kind of machine.

    Attributes:
        device: device of the model.
        distributed_backend: backend of torch.distributed.
        decoder_spec: ``(config, vp_stage)`` -> layer spec of one model chunk.
        recomputed: function from ``is_moe`` to the modules that selective recomputation recomputes.
        transformer_options: fields of TransformerConfig that depend on the machine (fusions,
            initialisation, communication between pipeline stages).
        layout_faults: ``(sizes, shape)`` -> the errors of a layout that this machine's layers do not support. The sizes
            must fit the model.
    """

    device: torch.device
    distributed_backend: str
    decoder_spec: Callable[[Any, int | None], Any]
    recomputed: Callable[[bool], tuple[str, ...]]
    transformer_options: Mapping[str, Any]
    layout_faults: Callable[[LayoutSizes, ModelShape], Iterable[LayoutFault]]


def has_cuda() -> bool:
    """Return whether training runs on GPUs."""
    return torch.cuda.is_available()


def gpu_fault() -> str | None:
    """Return why torch can't use the visible GPU; None if it can, or if there is no GPU."""
    if has_cuda() or not gpus.has_visible_gpu():
        return None
    return gpus.torch_gpu_fault(torch.__version__, torch.version.cuda)


def leave_out_deep_ep() -> None:
    """Let ``import deep_ep`` raise ImportError in this process, unless DeepEP's own package is installed.

    SGLang uses another package of that name. The import of that package asserts that the loaded NCCL fits and that nvcc
    starts. Megatron-Core catches ImportError, but not a failed assertion. The package also lacks names that
    Megatron-Core's dispatcher needs.
    """
    if not gpus.has_megatrons_deep_ep():
        sys.modules.setdefault("deep_ep", None)  # type: ignore[arg-type]


def prepare() -> None:
    """Prepare ``import megatron.core`` on this machine. Call once, before the first import."""
    leave_out_deep_ep()
    toolkit.leave_out_transformer_engine(os.environ)
    # Set the variables before the first CUDA call: CUDA reads some of them only once.
    if any(gpus.DEVICES.glob("nvidia[0-9]*")):
        _environment_lines.extend(set_missing_variables(os.environ))
        os.environ["PATH"] = toolkit.tool_path(os.environ)
        _environment_lines.extend(toolkit.offer_toolkit(os.environ))
        _environment_lines.extend(toolkit.offer_cudnn(os.environ))
        if has_transformer_engine():
            _environment_lines.extend(toolkit.load_cudnn(os.environ))
    if has_cuda():
        _environment_lines.append(_WGRAD_LINES[fused_weight_gradients()])
        if not has_transformer_engine():
            _environment_lines.append(_TORCH_LAYERS_LINE)
            _stand_in("megatron_shim").patch_torch_layers()
    else:
        _stand_in("megatron_shim").install()


def _stand_in(name: str) -> Any:
    """Import a stand-in for CUDA or for Transformer Engine's layers, a module that has an entry point."""
    return plugins.load_plugin(plugins.find_plugins(plugins.STAND_INS)[name])


def _torch_layers() -> Any:
    """Import the layers of torch modules: ``decoder_spec`` and ``layout_faults``, as in ``Platform``."""
    return _stand_in("torch_layers")


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed and not left out by ``toolkit.TORCH_LAYERS_VARIABLE``."""
    return importlib.util.find_spec("transformer_engine") is not None


def fused_weight_gradients() -> str | None:
    """Return the library whose kernels accumulate weight gradients in fp32; None without one.

    Transformer Engine's layers have these kernels; Megatron-Core's own layers need the kernel of apex. Without a
    kernel, a micro-batch's weight gradients are rounded to the weights' type before they are added.
    """
    if has_transformer_engine():
        return "Transformer Engine"
    try:
        importlib.import_module("fused_weight_gradient_mlp_cuda")
    except ImportError:
        # The library is not built, or built for another torch.
        return None
    return "apex"


def _make_output_layer_without_apex() -> None:
    """Let Megatron-Core build its output layer with fused weight gradients although apex is not installed.

    The layer's constructor requires apex, but only its own backward pass calls apex's kernel. This pass never runs,
    because ``leave_out_logits`` replaces the layer's forward pass. Not yet run on a GPU.
    """
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = True


def environment_lines() -> list[str]:
    """Return a line about each setting of this process on GPUs: variables of CUDA and NCCL, compilers, kernels."""
    return list(_environment_lines)


@cache
def current() -> Platform:
    """Return the Platform of this machine; on GPUs, select the device of LOCAL_RANK.

    Raises UnusableGpuError if torch was built for GPUs and can't use the visible one.
    """
    problem = gpu_fault()
    if problem is not None and torch.version.cuda is not None:
        raise UnusableGpuError(problem)
    if problem is not None:
        # The user has installed torch for CPUs, and the checks at the start of the run have accepted this.
        log.warning("training on CPUs: %s", problem)
    return _cuda() if has_cuda() else _cpu()


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, torch and Megatron's parallel random streams. Pass the same seed on every rank.

    Requires initialised model parallelism.
    """
    from megatron.core import tensor_parallel

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def peak_memory_bytes() -> int:
    """Return the peak memory of tensors on this rank's GPU since the last call.

    Without a GPU, return the peak of this process's resident memory since its start.
    """
    if not has_cuda():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def peak_flops() -> int | None:
    """Return the dense bf16 FLOP/s of this rank's GPU; None without a GPU, and for an unknown one."""
    if has_cuda():
        return gpus.peak_flops(torch.cuda.get_device_name())
    return None


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of this process's GPU; None without a GPU."""
    if has_cuda():
        return torch.cuda.get_device_capability()
    return None


def host_buffer(size: int) -> torch.Tensor:
    """Allocate uint8 [size] in host memory for copies of the device's tensors; pinned if there is a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=has_cuda())


def wait_for_copies() -> None:
    """Wait for the copies from the device to the host."""
    if has_cuda():
        torch.cuda.current_stream().synchronize()


class HostMemory:
    """Host memory for parked tensors: ``bytes``, uint8 [size], pinned if there is a GPU.

    Without a GPU, device memory is host memory, and a copy in memory would free nothing: ``bytes`` are then the bytes
    of a file (``FileBuffer``). Raises OSError or RuntimeError if there is not enough memory or disk.
    """

    def __init__(self, size: int) -> None:
        self._file: FileBuffer | None = None
        if has_cuda():
            self.bytes = host_buffer(size)
        else:
            self._file = FileBuffer(size)
            self.bytes = torch.from_numpy(self._file.array)

    def release_cache(self) -> None:
        """Release the memory that caches the file, because the parked tensors are not needed for a while."""
        if self._file is not None:
            self._file.release_memory()


def return_unused_memory() -> None:
    """Return memory that tensors have freed to the GPU, or to the system, so that other processes can use it."""
    if has_cuda():
        torch.cuda.empty_cache()
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def profiled_activities() -> list[torch.profiler.ProfilerActivity]:
    """Return the activities that torch.profiler can record on this device."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if has_cuda():
        return [*activities, torch.profiler.ProfilerActivity.CUDA]
    return activities


@contextmanager
def gpu_memory_history(snapshot: Path) -> Iterator[None]:
    """Record the allocations of GPU memory within the block, and write them to ``snapshot``; do nothing without a GPU.

    A snapshot that cannot be written causes a warning.
    """
    if not has_cuda():
        yield
        return
    torch.cuda.memory._record_memory_history()
    try:
        yield
        try:
            torch.cuda.memory._dump_snapshot(str(snapshot))
        except OSError as error:
            log.warning("profile: no snapshot of the GPU's memory: %s", error)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _te_decoder_spec(config: Any, vp_stage: int | None) -> Any:
    """Return the decoder's specification with Transformer Engine's layers.

    A model with delta nets has not yet run on a GPU.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if config.linear_attention_freq is not None:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as hybrid

        return hybrid.get_transformer_block_with_experimental_attention_variant_spec(
            config, vp_stage
        )
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def _te_recomputed(is_moe: bool) -> tuple[str, ...]:
    """Return the modules that ``recompute_modules`` recomputes with Transformer Engine's layers."""
    if is_moe:
        # Do not recompute attention: fused attention keeps only its inputs and one number for each row, so recomputing
        # it would save almost nothing.
        return ("moe_act", "layernorm")
    return ("core_attn",)


def _torch_recomputed(is_moe: bool) -> tuple[str, ...]:
    """Return the modules that ``recompute_modules`` recomputes with layers of torch modules."""
    return ("core_attn",)


def _te_layout_faults(sizes: LayoutSizes, shape: ModelShape) -> Iterable[LayoutFault]:
    """Yield a fault for a context-parallel model with sinks or windows of attention."""
    if sizes.context > 1 and (shape.has_sinks or shape.window is not None):
        expectation = (
            "1 with Transformer Engine's layers: its context parallelism of packed sequences with sinks and windows of "
            "attention has not been run"
        )
        yield LayoutFault("context", sizes.context, expectation)


def _cuda() -> Platform:
    """Select the GPU of LOCAL_RANK and return its Platform."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    platform = Platform(
        device=device,
        distributed_backend="nccl",
        decoder_spec=_te_decoder_spec,
        recomputed=_te_recomputed,
        transformer_options={
            "bias_activation_fusion": True,
            "bias_dropout_fusion": True,
            "apply_rope_fusion": True,
            "moe_permute_fusion": True,
            "batch_p2p_comm": True,
            "gradient_accumulation_fusion": fused_weight_gradients() is not None,
        },
        layout_faults=_te_layout_faults,
    )
    if not has_transformer_engine():
        return _with_torch_layers(platform)
    _make_output_layer_without_apex()
    return platform


def _with_torch_layers(cuda: Platform) -> Platform:
    """Return ``cuda`` with layers of torch modules in place of Transformer Engine's layers."""
    unfused = {
        "apply_rope_fusion": False,
        "moe_permute_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    layers = _torch_layers()
    return replace(
        cuda,
        decoder_spec=layers.decoder_spec,
        recomputed=_torch_recomputed,
        transformer_options={**cuda.transformer_options, **unfused},
        layout_faults=layers.layout_faults,
    )


def _cpu() -> Platform:
    """Return the Platform of a machine without a GPU."""
    layers = _torch_layers()
    return Platform(
        device=torch.device("cpu"),
        distributed_backend="gloo",
        decoder_spec=layers.decoder_spec,
        recomputed=_torch_recomputed,
        transformer_options={
            "use_cpu_initialization": True,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
            "apply_rope_fusion": False,
            "moe_permute_fusion": False,
            # Batched sends and receives of gloo exchange the wrong chunks in an interleaved
            # schedule, and overlapped sends read outputs that were already freed.
            "batch_p2p_comm": False,
            "overlap_p2p_comm": False,
        },
        layout_faults=layers.layout_faults,
    )
