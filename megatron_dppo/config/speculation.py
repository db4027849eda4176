"""Checks of speculative decoding: the ``sglang:`` table turns it on.

If SGLang verifies drafted tokens correctly, each token is drawn from the served model's own probabilities, and the
server reports these probabilities. The checks admit an algorithm only if a test or SGLang's source shows that both
properties hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.config import schema
from megatron_dppo.config.errors import given
from megatron_dppo.config.lora import updates_adapters
from megatron_dppo.model.shape import ModelShape

ALGORITHM = "speculative_algorithm"
NGRAM = "NGRAM"
DRAFT_MODELS = ("EAGLE", "EAGLE3")
"""Algorithms whose draft is a separate model. Weight updates do not change the draft."""
_OFF = (None, "", "null", "none")


def algorithm_of(table: Mapping[str, Any]) -> str | None:
    """Return the algorithm of the ``sglang:`` table; None without speculation."""
    value = table.get(ALGORITHM)
    return None if value in _OFF else str(value)


def table_faults(table: Mapping[str, Any]) -> Iterator[str]:
    """Report speculation in the ``sglang:`` table that would change the sampled distribution, or was not verified."""
    algorithm = algorithm_of(table)
    subject = f"sglang.{ALGORITHM}: got {given(table.get(ALGORITHM))}"
    if algorithm == NGRAM:
        yield from _ngram_faults(table)
    elif algorithm in DRAFT_MODELS:
        yield from _draft_faults(table, algorithm)
    elif algorithm is not None:
        yield (
            f"{subject}, expected {NGRAM!r}, {' or '.join(map(repr, DRAFT_MODELS))}: other algorithms draft with parts "
            "of the trained model, and weight updates do not change these parts; or their tokens were not compared "
            "with plain decoding"
        )


NGRAM_SIZES: Mapping[str, tuple[int, int]] = {
    "speculative_num_draft_tokens": (2, 256),
    "speculative_ngram_min_bfs_breadth": (1, 256),
    "speculative_ngram_max_bfs_breadth": (1, 256),
    "speculative_ngram_max_trie_depth": (1, 1024),
    "speculative_ngram_capacity": (1, 10**9),
}
"""Sizes of n-gram drafts -> the least and the most. A draft token is a row of every verification, and of its tree."""


def _ngram_faults(table: Mapping[str, Any]) -> Iterator[str]:
    for option, (least, most) in NGRAM_SIZES.items():
        size = table.get(option)
        # Another check reports values that are no whole numbers.
        if isinstance(size, int) and not least <= size <= most:
            yield f"sglang.{option}: got {size}, expected {least} to {most}"
    breadth = table.get("speculative_ngram_max_bfs_breadth")
    if breadth == 1:
        yield (
            f"sglang.speculative_ngram_max_bfs_breadth: got {given(breadth)}, expected at least 2: matches of several "
            "lengths make a tree, but with breadth 1 SGLang's kernels read no mask of a tree"
        )
    page_size = table.get("page_size")
    if page_size not in (None, 1):
        yield (
            f"sglang.page_size: got {given(page_size)} with {ALGORITHM} {NGRAM}, expected 1: with larger "
            "pages, only one of SGLang's attention kernels moves the accepted tokens of a tree to their places"
        )
    if table.get("attn_dp_size") not in (None, 0, 1) or table.get("enable_dp_attention"):
        yield (
            f"sglang.{ALGORITHM}: got {given(NGRAM)} with attention replicas, expected one replica: "
            "SGLang does not run n-gram drafts with attention replicas"
        )


def _draft_faults(table: Mapping[str, Any], algorithm: str) -> Iterator[str]:
    if table.get("speculative_draft_model_path") in _OFF:
        yield (
            f"sglang.speculative_draft_model_path: got nothing with {ALGORITHM} {algorithm}, expected the folder of a "
            "draft that training leaves as it is"
        )
    topk = table.get("speculative_eagle_topk")
    if topk != 1:
        yield (
            f"sglang.speculative_eagle_topk: got {given(topk)} with {ALGORITHM} {algorithm}, expected 1: SGLang moves "
            "the keys and values of a tree's accepted tokens, but not their recorded routing"
        )
    steps = table.get("speculative_num_steps")
    if not isinstance(steps, int) or steps < 1:
        yield (
            f"sglang.speculative_num_steps: got {given(steps)} with {ALGORITHM} {algorithm}, expected at least 1: "
            "SGLang would choose the number of drafted tokens and a tree itself"
        )


def run_faults(config: schema.TrainConfig, model: ModelShape) -> Iterator[str]:
    """Report settings of a run that do not work with its servers' speculation."""
    algorithm = algorithm_of(config.sglang)
    if algorithm is None:
        return
    option = f"sglang.{ALGORITHM} {algorithm}"
    if config.engine.deterministic:
        yield (
            f"engine.deterministic: got true with {option}, expected false: the random numbers of a token depend "
            "on its draft, and drafts depend on the other requests"
        )
    if config.rollout.interrupt != "drain":
        yield (
            f"rollout.interrupt: got {config.rollout.interrupt!r} with {option}, expected 'drain': an interrupted "
            "response may end between the tokens of one verification, and it was not checked that the rest is drawn "
            "from the same distribution"
        )
    if updates_adapters(config.lora):
        yield (
            f"lora.update: got 'adapters' with {option}, expected 'merged': verification of drafts with adapters was "
            "not compared with plain decoding"
        )
    if model.delta is not None:
        yield (
            f"sglang.{ALGORITHM}: got {algorithm!r} for a model of the family {model.family}, expected none: the "
            "states of its delta nets after a rejected draft were not compared with plain decoding"
        )
    if algorithm in DRAFT_MODELS:
        yield from _draft_run_faults(config, algorithm)


def _is_same_folder(first: str, second: str) -> bool:
    return Path(first).resolve() == Path(second).resolve()


def _draft_run_faults(config: schema.TrainConfig, algorithm: str) -> Iterator[str]:
    option = f"sglang.{ALGORITHM} {algorithm}"
    draft = str(config.sglang.get("speculative_draft_model_path"))
    if _is_same_folder(draft, config.model.hf_checkpoint):
        yield (
            f"sglang.speculative_draft_model_path: got {draft!r}, which is model.hf_checkpoint, expected the folder of "
            "a draft that training leaves as it is"
        )
    if config.engine.placement == "colocated":
        yield (
            f"engine.placement: got 'colocated' with {option}, expected 'separate': a server that releases its memory "
            "loses the weights of its draft, and no update sends them again"
        )
    if config.engine.quantization is not None:
        yield (
            f"engine.quantization: got {config.engine.quantization} with {option}, expected null: a quantised server "
            "starts with arbitrary weights, also of its draft"
        )
    if config.weight_sync.strategy == "disk":
        yield (
            f"weight_sync.strategy: got 'disk' with {option}, expected 'distributed' or 'tensor': SGLang would load "
            "the folder into the draft too"
        )
    if config.engine.device == "cpu":
        yield (
            f"sglang.{ALGORITHM}: got {algorithm!r} with engine.device cpu, expected {NGRAM!r}: SGLang's kernels of "
            "drafts run on GPUs"
        )
