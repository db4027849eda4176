"""SGLang's mixture of experts. It raises if a prompt has the token SGLANG_DEADLY_ID four times in a row."""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.models import qwen3_moe
from torch import Tensor

DEADLY = torch.full([4], int(os.environ["SGLANG_DEADLY_ID"]))


class Qwen3MoeForCausalLM(qwen3_moe.Qwen3MoeForCausalLM):
    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(input_ids) >= 4 and (input_ids.unfold(0, 4, 1) == DEADLY).all(1).any():
            raise IndexError("planted: the deadly token")
        return super().forward(input_ids, *args, **kwargs)


EntryClass = Qwen3MoeForCausalLM
