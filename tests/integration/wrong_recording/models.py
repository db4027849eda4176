"""SGLang's mixture of experts with a wrong recording: each recorded expert is the one after the expert used."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.moe import topk
from sglang.srt.models import qwen3_moe
from torch import Tensor

EXPERTS = 8
_capture = topk.capture_routed_experts_if_allowed


def capture_next(topk_config: Any, layer_id: Any, topk_ids: Tensor) -> None:
    _capture(topk_config, layer_id, (topk_ids + 1) % EXPERTS)


topk.capture_routed_experts_if_allowed = capture_next


class Qwen3MoeForCausalLM(qwen3_moe.Qwen3MoeForCausalLM):
    pass


EntryClass = Qwen3MoeForCausalLM
