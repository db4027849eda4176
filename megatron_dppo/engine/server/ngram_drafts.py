"""N-gram speculation in servers that ``engine.launch_server`` starts: distinct drafts, and routing of accepted tokens.

To draw the next token from the drafted tokens, SGLang adds up the probabilities of a node's children. This is right
only if the children have distinct tokens. But SGLang fills trees with children of the root that all have the token 0.
Each of them adds the probability of the token 0 once more, so that the server would draw this token too often.

SGLang moves the keys and values of a tree's accepted nodes to the first places of the tree, but does not move their
recorded routing. With an overlapped schedule SGLang drops the recording. This module keeps the recording and moves the
routing. On a GPU the module has not yet run.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dppo.engine.server import hooks

if TYPE_CHECKING:
    from torch import Tensor

CREATED = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
MOVED = "sglang.srt.speculative.ngram_worker.move_accept_tokens_to_target_kvcache"


def register() -> None:
    """Register the hook, in each process of a server, before SGLang applies its plugins' hooks."""
    hooks.register(CREATED, with_distinct_drafts, "after")


def with_distinct_drafts(worker: type, algorithm: Any, *_: Any) -> type:
    """Hook after SGLang has chosen its class of speculation: for n-grams return this module's subclass of the class."""
    if not algorithm.is_ngram():
        return worker
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks.register(MOVED, note_accepted, "before")
    # ``register`` leaves the first hook of a target to ``apply_hooks``. SGLang has already called ``apply_hooks``.
    HookRegistry.apply_hooks()
    return _distinct_worker(worker)


def note_accepted(batch: Any, accept_index: Tensor, *_: Any) -> None:
    """Hook before SGLang moves the accepted nodes' keys and values: keep their indices in the batch."""
    batch.accepted_nodes = accept_index


@functools.cache
def _distinct_worker(worker: Any) -> type:
    """Return a subclass of SGLang's n-gram ``worker`` with distinct drafts and the routing of accepted tokens."""

    class DistinctDrafts(worker):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._observed_target = ObservedTarget(self._target_worker)

        @property
        def target_worker(self) -> Any:
            return self._observed_target

        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            tokens, mask = super()._prepare_draft_tokens(batch)
            return tokens, detach_repetitions(tokens, mask, self.draft_token_num)

        def forward_batch_generation(self, batch: Any, *arguments: Any, **options: Any) -> Any:
            batch.accepted_nodes = None
            result = super().forward_batch_generation(batch, *arguments, **options)
            result.routed_experts_output = self._observed_target.recording
            if batch.accepted_nodes is not None:
                _move_recording(result.routed_experts_output, batch)
            return result

    return DistinctDrafts


class ObservedTarget:
    """The worker of the served model. ``recording`` is the recorded routing of the worker's last pass.

    ``recording`` is None without recordings, or if SGLang has stored the recording already.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self.recording: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward_batch_generation(self, *arguments: Any, **options: Any) -> Any:
        result = self._target.forward_batch_generation(*arguments, **options)
        self.recording = result.routed_experts_output
        return result


def _move_recording(recording: Any, batch: Any) -> None:
    """Move the rows of the accepted nodes, in a pass's ``recording`` or in SGLang's store on the host."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    capturer = get_global_experts_capturer()
    if capturer is None:
        return
    order = accepted_first(batch.accepted_nodes)
    if recording is not None:
        recording.topk[: len(order)] = recording.topk[order]
        return
    places = batch.out_cache_loc.cpu()
    rows = capturer.host_cache.buffer
    rows[places] = rows[places[order.cpu()]]


def accepted_first(accepted_nodes: Tensor) -> Tensor:
    """Return, for each place of a batch of trees, the index of the node whose row belongs there, int64 ``[B N]``.

    ``accepted_nodes`` ``[B, N]``: the indices, in the batch, of each tree's accepted nodes, then -1. The places with -1
    keep their own rows.
    """
    import torch

    own_nodes = torch.arange(accepted_nodes.numel(), device=accepted_nodes.device)
    own_nodes = own_nodes.view(accepted_nodes.shape)
    return torch.where(accepted_nodes >= 0, accepted_nodes, own_nodes).view(-1).long()


def detach_repetitions(tokens: np.ndarray, mask: np.ndarray, nodes: int) -> np.ndarray:
    """Return ``mask`` without the ancestors of nodes that repeat the token of an earlier sibling.

    A node without ancestors is no child of another node, and is never accepted. So its attention, which is computed
    without the ancestors, is not used. The nodes below it lose their ancestors too.

    Args:
        tokens: integers ``[requests * nodes]``; the first token of each tree is its root.
        mask: integers ``[requests * nodes * nodes]``; element i, j of a tree is 1 if node j is an ancestor of node i,
            or i itself. Ancestors precede a node.
        nodes: number of nodes in each tree.
    """
    trees = mask.reshape(-1, nodes, nodes).copy()
    rows = tokens.reshape(-1, nodes)
    order = np.arange(nodes)
    ancestors = np.tril(trees, -1).astype(bool)
    # Ancestors are in the order of their depth, so the last ancestor is the parent. A root has the parent -1.
    parents = np.where(ancestors, order, -1).max(-1)
    is_same = (rows[:, :, None] == rows[:, None, :]) & (parents[:, :, None] == parents[:, None, :])
    is_earlier = order < order[:, None]
    is_repetition = (is_same & is_earlier).any(-1) & (parents >= 0)
    is_below = (ancestors & is_repetition[:, None, :]).any(-1)
    trees[is_repetition | is_below] = 0
    trees[:, order, order] = 1
    return trees.reshape(mask.shape)
