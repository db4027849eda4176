"""Shim that runs Megatron-Core without CUDA: call ``install()`` before the first ``import megatron.core``.

Megatron-Core selects its device by literals (``device="cuda"``, ``"torch.cuda.FloatTensor"``) and by calls of
``torch.cuda``. The shim replaces the literals in the code objects of megatron's own modules at import, so other
libraries still use an unchanged torch. The torch.cuda functions get CPU implementations. This changes nothing for other
libraries: without CUDA the original functions could only raise.

Two simpler ways do not work: wrapped factory functions of torch would change the results of other libraries, and a
TorchFunctionMode is not active in other threads and in backward passes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

CPU = torch.device("cpu")
_LITERALS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


def _on_cpu(constant: Any) -> Any:
    """Replace the CUDA literals in a constant of a code object, recursively."""
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=tuple(map(_on_cpu, constant.co_consts)))
    if isinstance(constant, (tuple, frozenset)):
        return type(constant)(map(_on_cpu, constant))
    if isinstance(constant, str):
        return _LITERALS.get(constant, constant)
    return constant


class _ShimLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType | None:
        return _on_cpu(super().get_code(fullname))

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            # The fuser calls torch.compile, which would build C++ code for minutes and gain nothing for small models.
            module.disable_jit_fuser()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _ShimLoader(spec.loader.name, spec.loader.path)
        return spec


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept any arguments and do nothing: execution on a CPU is synchronous."""


class _Stream:
    """Replacement of a CUDA stream or event; its methods do nothing, as execution is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _do_nothing

    def record_event(self, *args: Any) -> _Stream:
        return self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def install() -> None:
    """Install the shim; repeated calls do nothing. Raises RuntimeError if megatron.core is already loaded."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before megatron_dppo.trainer, so its device is still cuda"
        )
    sys.meta_path.insert(0, _Finder())
    # Megatron-Core tries to import this package and catches ImportError. Without a driver the import would raise
    # OSError; with None in sys.modules it raises ImportError.
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
    _silence_warnings()
    _replace_torch_cuda()
    _patch_megatron()


def _silence_warnings() -> None:
    """Hide the warnings that megatron.core causes: missing GPU libraries, a variable of CUDA, deprecated names."""
    for message in ("Transformer Engine", "Apex", "CUDA_DEVICE_MAX_CONNECTIONS", "full scope is"):
        warnings.filterwarnings("ignore", f".*{message}", UserWarning, r"megatron\.core\b.*")
    warnings.filterwarnings("ignore", r".*`torch\.distributed\.", FutureWarning, r"torch\..*")


def _replace_torch_cuda() -> None:
    """Replace the torch.cuda functions that megatron.core calls by CPU implementations."""
    stream = _Stream()

    def current_device() -> torch.device:
        # Megatron-Core passes the result only as ``device=``.
        return CPU

    def current_stream(device: Any = None) -> _Stream:
        return stream

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    replacements = {
        "current_device": current_device,
        "synchronize": _do_nothing,
        "empty_cache": _do_nothing,
        "Stream": _Stream,
        "Event": _Stream,
        "stream": _Stream,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": get_rng_state,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.Tensor.cuda = cuda  # type: ignore[method-assign, assignment]


def _patch_megatron() -> None:
    """Patch the places of megatron-core 0.16.1 that replacing literals does not cover."""
    from megatron.core.models.common.embeddings import (
        rotary_pos_embedding,
        yarn_rotary_pos_embedding,
    )
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher

    def get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_rng_state(state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    # The original set function queues the state until CUDA starts. Without CUDA, the random number tracker would
    # therefore never change the state.
    random._get_cuda_rng_state = get_rng_state
    random._set_cuda_rng_state = set_rng_state
    # The original converts only CUDA tensors to numpy, but the split sizes of an all-to-all must be in numpy here too.
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes
    # The original copies two numbers from page-locked memory, and page-locked memory needs a device.
    for module in (rotary_pos_embedding, yarn_rotary_pos_embedding):
        module.get_pos_emb_on_this_cp_rank = _own_positions
    # The original finds the tensors of a device by ``is_cuda``, and copies them to page-locked memory.
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _divide_parameters
    # Gloo gathers and scatters only parts of equal size, but the ranks' numbers of tokens for experts are unequal.
    mappings._gather_along_first_dim = _gathering(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _scattering(mappings._reduce_scatter_along_first_dim)
    patch_torch_layers()


def patch_torch_layers() -> None:
    """Patch the places of megatron-core 0.16.1 that need Transformer Engine, on a CPU and on a GPU without it."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import optimizer_config
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    from megatron_dppo.cpu.torch_layers import WholeLinear

    # Latent attention recognises linears that are not divided among ranks by the class TELinear.
    multi_latent_attention.TELinear = WholeLinear
    # With a precision-aware optimizer the original compares the version of Transformer Engine, and fails without
    # Transformer Engine.
    optimizer_config.is_te_min_version = _has_no_version
    # This name is defined only if Transformer Engine is installed.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # The original slices each sequence in every layer: too slow for hundreds of short sequences.
    rope_utils._apply_rotary_pos_emb_thd = _rotary_thd


def _has_no_version(*args: Any, **kwargs: Any) -> bool:
    return False


def _divide_parameters(optimizer: Any, offload_fraction: float) -> tuple[Any, ...]:
    """Replace ``HybridDeviceOptimizer._get_sub_optimizer_param_groups`` if device memory is host memory.

    Every tensor counts as a tensor of the device. As in the original, the first tensors are copied until the copies
    have ``offload_fraction`` of all elements. With ``param_update_in_fp32`` tensors of other types get fp32 masters.
    """
    # Page-locked memory needs a device, so gradients are not copied to it either.
    optimizer.pin_cpu_grads = False
    groups = optimizer.param_groups
    threshold = offload_fraction * sum(p.numel() for group in groups for p in group["params"])
    copied = 0
    host_groups: list[dict[str, Any]] = []
    device_groups: list[dict[str, Any]] = []
    host_copies: dict[torch.Tensor, torch.Tensor] = {}
    masters: dict[torch.Tensor, torch.Tensor] = {}
    for group in groups:
        host_group = {**group, "params": []}
        device_group = {**group, "params": []}
        for param in group["params"]:
            # The optimizer of the group updates this tensor: the parameter, its copy or its master.
            updated = param
            is_offloaded = copied < threshold
            if is_offloaded:
                updated = param.detach().clone()
                copied += param.numel()
            if optimizer.param_update_in_fp32 and param.dtype != torch.float32:
                updated = updated.detach().clone().float()
                masters[param] = updated
            if is_offloaded:
                host_copies[param] = updated
                host_group["params"].append(updated)
            else:
                device_group["params"].append(updated)
        if host_group["params"]:
            host_groups.append(host_group)
        if device_group["params"]:
            device_groups.append(device_group)
    params_of_copies = {copy: param for param, copy in host_copies.items()}
    return host_groups, device_groups, host_copies, params_of_copies, masters


def _own_positions(pos_emb: torch.Tensor, seq_dim: int, cp_group: ProcessGroup) -> torch.Tensor:
    """Return the rows of context-parallel rank r: of 2 C equal parts along ``seq_dim``, the parts r and 2 C - 1 - r."""
    parts = pos_emb.chunk(2 * cp_group.size(), seq_dim)
    return torch.cat([parts[cp_group.rank()], parts[-1 - cp_group.rank()]], seq_dim)


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace ``token_dispatcher.maybe_move_tensor_to_cpu`` for tensors that are on the CPU already."""
    if as_numpy and torch.is_tensor(tensor):
        return tensor.numpy()
    return tensor


def _gathering(equal_parts: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``_gather_along_first_dim`` for unequal parts: pad each to the largest size, gather, and cut."""

    def gather(
        input_: torch.Tensor,
        group: ProcessGroup,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return equal_parts(input_, group, None, use_global_buffer)
        largest_size = max(output_split_sizes)
        padded = equal_parts(_padded(input_, largest_size), group)
        parts = padded.split(largest_size)
        return torch.cat([p[:n] for p, n in zip(parts, output_split_sizes, strict=True)])

    return gather


def _scattering(equal_parts: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``_reduce_scatter_along_first_dim`` for unequal parts: pad each to the largest size, reduce, and cut."""

    def scatter(
        input_: torch.Tensor,
        group: ProcessGroup,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return equal_parts(input_, group, None, use_global_buffer)
        largest_size = max(input_split_sizes)
        parts = [_padded(part, largest_size) for part in input_.split(input_split_sizes)]
        return equal_parts(torch.cat(parts), group)[: input_split_sizes[group.rank()]]

    return scatter


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def _rotary_thd(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> torch.Tensor:
    """Rotate a rank's own rows ``t`` [T / CP, heads, dim]; ``freqs`` [max_seqlen, 1, 1, dim]."""
    from megatron.core.models.common.embeddings import rope_utils

    from megatron_dppo.trainer.context_parallel import own_rows

    size = cp_group.size()
    tokens = t.shape[0] * cp_group.size()
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=tokens)
    rows = own_rows(cu_seqlens, tokens, size, cp_group.rank())
    positions = rows - starts[rows]
    rotated = rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1),
        freqs[positions],
        rotary_interleaved=rotary_interleaved,
        multi_latent_attention=multi_latent_attention,
        mscale=mscale,
    )
    return rotated.squeeze(1)
