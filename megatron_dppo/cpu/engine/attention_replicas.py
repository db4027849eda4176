"""Attention in data parallel on a CPU: SGLang pads the replicas' batches and gathers their tokens.

SGLang has plain code for CPUs, but selects this code only on its own CPU platform, which needs sgl_kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SLEEPING = "sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep"
_LONGEST_SLEEP_MS = 20
PADDED_LENGTH = 1
"""Number of tokens in the sequence of a padded row. The row reads the cache's first slot: no request has this slot."""


def use_plain_code() -> None:
    """Select SGLang's CPU code for padding batches, and for copying and gathering tokens."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import forward_batch_info

    forward_batch_info._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    parallel_state.reg_all_gather_into_tensor = all_gather
    parallel_state.reg_reduce_scatter_tensor = reduce_scatter
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = padded_length


def all_gather(output: Tensor, input: Tensor, group_name: str) -> None:
    """Gather in one of SGLang's groups of ranks; SGLang's custom operator has no kernel for CPUs.

    SGLang gathers logits ``[rows, columns]`` into ``[ranks, rows, columns]``. Gloo refuses these shapes, so that both
    tensors are gathered flat. A replica without requests has no rows on any rank, and gathers nothing.
    """
    from sglang.srt.distributed import parallel_state

    if output.numel():
        group = parallel_state._groups[group_name]()
        group._all_gather_into_tensor(output.view(-1), input.contiguous().view(-1))


def reduce_scatter(output: Tensor, input: Tensor, group_name: str) -> None:
    """Reduce and scatter in one of SGLang's groups of ranks."""
    from sglang.srt.distributed import parallel_state

    parallel_state._groups[group_name]()._reduce_scatter_tensor(output, input)


def sleep_briefly(original: Callable[[Any], None], sleeper: Any) -> None:
    """Sleep until a request arrives; with several replicas at most _LONGEST_SLEEP_MS.

    A step of one replica waits for all replicas, but a request for one replica does not wake the other replicas.
    """
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().attn_dp_size == 1:
        original(sleeper)
    else:
        sleeper.poller.poll(_LONGEST_SLEEP_MS)


def padded_length(backend: Any) -> int:
    """Return the length of the sequence of a padded row."""
    return PADDED_LENGTH
