"""Speculative decoding with n-grams: SGLang builds, scores and samples the trees of drafted tokens in CUDA kernels.
This module has the same functions in PyTorch.

Legend: B requests, N nodes of a request's tree, V tokens of the vocabulary, H heads. The first node of a tree is the
request's last token. A node's links are the indices of its first child and of its next sibling, -1 for none.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_dppo.cpu.engine.sampling import filtered
from megatron_dppo.engine.server import hooks

NGRAM = "NGRAM"
ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend"
_KERNELS = "sgl_kernel"


def use_pytorch(replace: Callable[[types.ModuleType, str, Any], None]) -> None:
    """Put the functions of this module in place of SGLang's functions.

    Call this function before the server makes its memory pools.

    ``replace(module, name, function)`` puts ``function`` in the place of the module's function ``name``.
    """
    _import_tree_links()
    from sglang.kernels.ops.sampling import renorm
    from sglang.kernels.ops.speculative import (
        cache_locs,
        eagle,
        reconstruct_tree,
        spec_tree,
        verify_sampling,
    )
    from sglang.srt.mem_cache import allocation, memory_pool
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative import eagle_utils, ngram_worker, spec_utils  # noqa: F401

    replace(reconstruct_tree, "reconstruct_indices_from_tree_mask_func", link_trees)
    replace(cache_locs, "fill_front_out_cache_loc_func", fill_front_locations)
    replace(eagle, "fill_accept_out_cache_loc_func", fill_accepted_locations)
    replace(allocation, "assign_req_to_token_pool_func", assign_locations)
    replace(spec_tree, "verify_tree_greedy_func", verify_greedily)
    # SGLang has None in the place of kernels that a platform lacks. ``replace`` finds the modules that have imported a
    # function by comparing with the function, which None does not allow. So name each module here.
    for module in (verify_sampling, eagle_utils):
        module.tree_speculative_sampling_target_only = verify_by_sampling
    for module in (renorm, eagle_utils):
        module.top_k_renorm_prob = renormalized_top_k
        module.top_p_renorm_prob = renormalized_top_p
    pool = memory_pool.MHATokenToKVPool
    pool._init_kv_copy_and_warmup = _copy_plainly
    pool._move_kv_cache_impl = _move_rows
    hooks.register(ATTENTION, attend_in_trees, "around")
    # ``register`` leaves the first hook of a target to ``apply_hooks``. SGLang has already called ``apply_hooks``.
    HookRegistry.apply_hooks()


def _import_tree_links() -> None:
    """Import SGLang's module of the trees' links. It imports a kernel from sgl_kernel, which may be missing: stand-in
    modules then have ``link_trees`` in the kernel's place."""
    stand_ins = (types.ModuleType(_KERNELS), types.ModuleType(f"{_KERNELS}.speculative"))
    vars(stand_ins[1])["reconstruct_indices_from_tree_mask"] = link_trees
    missing = [module for module in stand_ins if module.__name__ not in sys.modules]
    sys.modules.update({module.__name__: module for module in missing})
    try:
        import sglang.kernels.ops.speculative.reconstruct_tree  # noqa: F401
    finally:
        # SGLang tests for the package by importing it, so remove the stand-ins.
        for module in missing:
            del sys.modules[module.__name__]


def link_trees(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write positions ``[B N]``, indices and links ``[B, N]`` of the nodes of the trees in ``tree_mask``.

    ``tree_mask`` ``[B N N]``: element i, j of a tree is whether node j is an ancestor of node i, or i itself. Ancestors
    precede a node. A node's position is its number of ancestors, added to its request's ``verified_seq_len``.
    """
    shape = (batch_size, draft_token_num, draft_token_num)
    ancestors = tree_mask.view(shape).bool().tril(-1)
    depths = ancestors.sum(-1)
    positions.copy_((depths + verified_seq_len[:, None]).view(-1))
    nodes = torch.arange(draft_token_num)
    retrieve_index.copy_(torch.arange(batch_size)[:, None] * draft_token_num + nodes)
    parents = torch.where(ancestors, nodes, -1).amax(-1)
    is_child = parents[:, None, :] == nodes[:, None]
    retrieve_next_token.copy_(_first_true(is_child))
    is_sibling = (parents[:, None, :] == parents[:, :, None]) & (nodes > nodes[:, None])
    is_sibling &= parents[:, :, None] >= 0
    retrieve_next_sibling.copy_(_first_true(is_sibling))


def _first_true(rows: Tensor) -> Tensor:
    """Return the index of the first true element of each row of the last dimension; -1 if there is none."""
    return torch.where(rows.any(-1), rows.int().argmax(-1), -1)


def verify_by_sampling(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    **options: Any,
) -> None:
    """Sample each request's next tokens from the model's distribution, along its tree of drafted tokens.

    At each node the probabilities of its children are added up in order. The walk goes on to the first child at which
    the sum exceeds the node's number in ``uniform_samples``. If no sum exceeds this number, the walk ends: a token is
    drawn from the distribution without the children's tokens. So each token has the model's probability if siblings
    have distinct tokens.

    Args:
        predicts: int32 ``[B N]``, written: the token after each accepted node.
        accept_index: int32 ``[B, depth]``, written: the indices of the accepted nodes.
        accept_token_num: int32 ``[B]``, written: the number of accepted drafted tokens.
        candidates: tokens of the nodes ``[B, N]``.
        retrive_index: indices of the nodes in the batch ``[B, N]``.
        retrive_next_token: first children ``[B, N]``.
        retrive_next_sibling: next siblings ``[B, N]``.
        uniform_samples: fp32 ``[B, N]`` in [0, 1).
        uniform_samples_for_final_sampling: fp32 ``[B]`` in [0, 1).
        target_probs: the model's probabilities after each node ``[B, N, V]``.
        options: further options of SGLang's kernel. The thresholds among them must be 1.

    Raises ValueError for other thresholds: they would accept tokens more often than the model's probability says.
    """
    for name in ("threshold_single", "threshold_acc"):
        if options.get(name, 1.0) != 1.0:
            raise ValueError(f"speculative_accept_{name} is {options[name]}, expected 1")
    coins = uniform_samples.tolist()
    final_coins = uniform_samples_for_final_sampling.tolist()
    trees = _trees(candidates, retrive_next_token, retrive_next_sibling)
    for request, tree in enumerate(trees):
        probs = target_probs[request]
        path = [0]
        while True:
            node = path[-1]
            children = tree.children(node)
            child_tokens = [tree.tokens[child] for child in children]
            sums = probs[node, child_tokens].cumsum(0)
            drawn = (sums > coins[request][node]).nonzero()
            if not drawn.numel():
                break
            path.append(children[int(drawn[0])])
        last_token = _drawn(probs[path[-1]], child_tokens, final_coins[request])
        accept_token_num[request] = len(path) - 1
        _write_path(request, path, tree, last_token, retrive_index, predicts, accept_index)


def verify_greedily(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept each drafted token that is the most probable token after its parent.

    ``target_predict`` ``[B, N]``: the most probable token after each node. ``topk`` is not read. The other arguments
    are as in ``verify_by_sampling``.
    """
    best = target_predict.tolist()
    trees = _trees(candidates, retrieve_next_token, retrieve_next_sibling)
    for request, tree in enumerate(trees):
        path = [0]
        while True:
            node = path[-1]
            hits = [n for n in tree.children(node) if tree.tokens[n] == best[request][node]]
            if not hits:
                break
            path.append(hits[0])
        accept_token_num[request] = len(path) - 1
        last_token = best[request][path[-1]]
        _write_path(request, path, tree, last_token, retrieve_index, predicts, accept_index)
    return predicts, accept_index, accept_token_num


@dataclass(frozen=True)
class _Tree:
    """The tokens and links of one request's nodes."""

    tokens: Sequence[int]
    first_children: Sequence[int]
    next_siblings: Sequence[int]

    def children(self, node: int) -> list[int]:
        found: list[int] = []
        child = self.first_children[node]
        while child != -1:
            found.append(child)
            child = self.next_siblings[child]
        return found


def _trees(candidates: Tensor, first_children: Tensor, next_siblings: Tensor) -> list[_Tree]:
    rows = zip(candidates.tolist(), first_children.tolist(), next_siblings.tolist(), strict=True)
    return [_Tree(*row) for row in rows]


def _write_path(
    request: int,
    path: list[int],
    tree: _Tree,
    last_token: int,
    indices: Tensor,
    predicts: Tensor,
    accept_index: Tensor,
) -> None:
    """Write the nodes of ``path``, and the token after each node. ``last_token`` follows the last node."""
    accepted = indices[request, path]
    tokens = [*(tree.tokens[node] for node in path[1:]), last_token]
    accept_index[request, : len(path)] = accepted
    predicts[accepted] = torch.tensor(tokens, dtype=predicts.dtype)


def _drawn(probs: Tensor, excluded: list[int], coin: float) -> int:
    """Return the token that ``coin`` in [0, 1) selects from ``probs`` ``[V]`` without the ``excluded`` tokens."""
    weights = probs.double()
    weights[excluded] = 0
    sums = weights.cumsum(0)
    if sums[-1] == 0:
        # Only excluded tokens have a probability. Rounding has made their sum less than 1: select one of them.
        return excluded[int(probs[excluded].argmax())]
    token = int(torch.searchsorted(sums, coin * sums[-1], right=True))
    # The product may be rounded up to the whole sum. Then the index is beyond the last token with a probability.
    return min(token, int(weights.nonzero()[-1]))


def renormalized_top_k(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Return ``probs`` ``[n, V]`` of each row's ``top_ks`` most probable tokens, normalised."""
    no_top_p = torch.ones(len(probs))
    return _normalized(filtered(probs, top_ks, no_top_p))


def renormalized_top_p(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Return ``probs`` ``[n, V]`` of each row's most probable tokens with the mass ``top_ps``, normalised."""
    no_top_k = torch.full((len(probs),), probs.shape[-1])
    return _normalized(filtered(probs, no_top_k, top_ps))


def _normalized(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def cache_locations(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    **_: Any,
) -> Tensor:
    """Return the places in the cache of each request's positions from ``start_offset`` to ``end_offset``, int64."""
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in rows]).long()


def assign_locations(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write the places ``out_cache_loc`` to the requests' positions from ``start_offset`` to ``end_offset``."""
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    taken = 0
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def fill_front_locations(num_front: Tensor, out_cache_loc: Tensor, front: Tensor) -> None:
    """Write to ``front`` the first ``num_front`` places of each request's nodes, without gaps."""
    places = out_cache_loc.view(len(num_front), -1)
    is_front = torch.arange(places.shape[1]) < num_front[:, None]
    front[: int(is_front.sum())] = places[is_front]


def fill_accepted_locations(
    accept_index: Tensor, out_cache_loc: Tensor, accepted: Tensor, size: int
) -> None:
    """Write to ``accepted`` the places of the accepted nodes, without gaps; ``size`` is not read."""
    indices = accept_index[accept_index >= 0].long()
    accepted[: len(indices)] = out_cache_loc[indices]


def _copy_plainly(pool: Any) -> None:
    """Prepare no Triton kernel for ``_move_rows``."""
    pool._kv_copy_config = None


def _move_rows(pool: Any, tgt_loc: Tensor, src_loc: Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import move_kv_cache_native

    move_kv_cache_native(pool.k_buffer, pool.v_buffer, tgt_loc, src_loc)


def attend_in_trees(
    original: Callable[..., Tensor],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **options: Any,
) -> Tensor:
    """Compute the attention of trees of drafted tokens.

    SGLang's own method has no mask: a node would attend to nodes that are not its ancestors.
    """
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **options)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = backend.token_to_kv_pool
    if save_kv_cache and k is not None:
        places = KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc)
        pool.set_kv_buffer(layer, places, k, v)
    queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
    outputs = q.new_empty(len(queries), layer.tp_q_head_num, layer.v_head_dim)
    keys = pool.get_key_buffer(layer.layer_id)
    values = pool.get_value_buffer(layer.layer_id)
    window = layer.sliding_window_size
    trees = _tree_rows(forward_batch, backend.req_to_token_pool.req_to_token)
    for nodes, places, mask in trees:
        allowed = mask
        if window is not None and window > -1:
            positions = forward_batch.positions[nodes]
            key_positions = torch.cat([torch.arange(int(positions[0])), positions])
            allowed = mask & (key_positions >= positions[:, None] - window)
        attended = scaled_dot_product_attention(
            queries[nodes].transpose(0, 1),
            keys[places].transpose(0, 1).to(q.dtype),
            values[places].transpose(0, 1).to(q.dtype),
            attn_mask=allowed,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        outputs[nodes] = attended.transpose(0, 1)
    return outputs.view(len(queries), -1)


def _tree_rows(forward_batch: Any, req_to_token: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield for each request the slice of its nodes in the batch, the places of its tokens, and the nodes' mask.

    The places ``[T + N]`` belong to the tokens before the tree, then to the nodes. The mask ``[N, T + N]``: whether a
    node attends to a token.
    """
    nodes = forward_batch.spec_info.draft_token_num
    flat_mask = forward_batch.spec_info.custom_mask
    read = 0
    lengths = forward_batch.seq_lens.tolist()
    for request, row in enumerate(forward_batch.req_pool_indices.tolist()):
        tokens = lengths[request] + nodes
        mask = flat_mask[read : read + nodes * tokens].view(nodes, tokens)
        read += nodes * tokens
        own_nodes = slice(request * nodes, (request + 1) * nodes)
        yield own_nodes, req_to_token[row, :tokens].long(), mask
