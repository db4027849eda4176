"""The measured implementations: from this project, Megatron-Core, torch and other installed packages.

An implementation maps this rank's logits [T, V / TP] to log-probabilities [T], and to the entropy [T] or None.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo import __version__
from megatron_dppo.vocab_parallel import policy_stats


@dataclass(frozen=True)
class Inputs:
    """Input of implementations beside the logits. ``group``: the tensor-parallel ranks; ``ranks``: their number."""

    target_ids: Tensor
    topk_ids: Tensor
    vocab_size: int
    group: dist.ProcessGroup | None
    ranks: int


Forward = Callable[[Tensor, Inputs], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Contender:
    """One implementation; ``entropy``, ``topk``: whether it computes these statistics too."""

    name: str
    version: str
    forward: Forward
    entropy: bool = False
    topk: bool = False


def ours(*, entropy: bool, topk: bool, backend: str | None = None) -> Forward:
    """Return this project's ``policy_stats``, with or without entropy and Top-K."""

    def forward(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        stats = policy_stats(
            logits,
            inputs.target_ids,
            inputs.group if inputs.ranks > 1 else None,
            vocab_size=inputs.vocab_size,
            with_entropy=entropy,
            topk_ids=inputs.topk_ids if topk else None,
            backend=backend,
        )
        return stats.log_probs, stats.entropy

    return forward


def megatron_cross_entropy(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Call Megatron-Core's unfused vocab-parallel cross entropy."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(logits, inputs.target_ids), None


def megatron_fused_cross_entropy(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Call Megatron-Core's cross entropy that uses torch.compile."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return -fused_vocab_parallel_cross_entropy(logits, inputs.target_ids, inputs.group), None


def torch_log_softmax(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Compute log_softmax in fp32, and gather the targets; for one rank only."""
    log_p = logits.float().log_softmax(-1)
    return log_p.gather(1, inputs.target_ids[:, None])[:, 0], None


def transformer_engine(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Call Transformer Engine's Triton cross entropy."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    loss = parallel_cross_entropy(
        logits[:, None],
        inputs.target_ids[:, None],
        # Without label smoothing and without the mean over tokens.
        0.0,
        False,
        inputs.group if inputs.ranks > 1 else None,
    )
    return -loss[:, 0], None


def liger(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Call Liger's Triton cross entropy; for one rank only."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    return -liger_cross_entropy(logits, inputs.target_ids, reduction="none"), None


def prepare_megatron(tensor_parallel: int) -> None:
    """Create Megatron-Core's process groups: its cross entropies need them."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)


def contenders(device: str, ranks: int, compiled: bool) -> list[Contender]:
    """Return all implementations that can run here, this project's first."""
    runnable = [
        Contender("policy_stats", __version__, ours(entropy=False, topk=False)),
        Contender(
            "policy_stats + entropy", __version__, ours(entropy=True, topk=False), entropy=True
        ),
        Contender(
            "policy_stats + entropy + Top-K",
            __version__,
            ours(entropy=True, topk=True),
            entropy=True,
            topk=True,
        ),
        Contender(
            "policy_stats (eager) + entropy",
            __version__,
            ours(entropy=True, topk=False, backend="eager"),
            entropy=True,
        ),
    ]
    version = importlib.metadata.version("megatron-core")
    fused_name = "Megatron-Core fused CE"
    if not compiled:
        fused_name += " (torch.compile off)"
    runnable.append(Contender("Megatron-Core CE", version, megatron_cross_entropy))
    runnable.append(Contender(fused_name, version, megatron_fused_cross_entropy))
    if ranks == 1:
        runnable.append(Contender("torch log_softmax", torch.__version__, torch_log_softmax))
    if device == "cuda" and importlib.util.find_spec("transformer_engine"):
        version = importlib.metadata.version("transformer-engine")
        runnable.append(Contender("Transformer Engine CE", version, transformer_engine))
    if device == "cuda" and ranks == 1 and importlib.util.find_spec("liger_kernel"):
        version = importlib.metadata.version("liger-kernel")
        runnable.append(Contender("Liger CE", version, liger))
    return runnable
