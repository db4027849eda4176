"""A copy of the policy that samples in an engine's place, with a mismatch that is declared and measured.

The copy is the model by transformers, in float32 and with a cache of keys and values; a mismatch changes its weights,
its arithmetic, its age or its routing. mu is always what was sampled from: the changed copy's log-probabilities.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from examples.arena.mismatches import Mismatch, Rounding
from megatron_dppo.block_fp8 import dequantize, quantize
from megatron_dppo.diagnostics.doctor.rounding import activations_in_block_fp8, bfloat16
from megatron_dppo.model.quantization import is_quantized


@dataclass(frozen=True)
class Sampled:
    """Responses to B prompts of S tokens, of N tokens each.

    ``ids``: int64 [B, S + N]. ``log_probs``: log mu, fp32 [B, N]. ``topk_ids``, ``topk_log_probs``: [B, N, K] or None.
    ``experts``: [B, S + N - 1, L, k], or None where nothing is replayed.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    topk_ids: np.ndarray | None = None
    topk_log_probs: np.ndarray | None = None
    experts: np.ndarray | None = None


class PolicyCopy:
    """The model in ``folder`` under ``mismatch``; ``update`` brings it to the trainer's weights."""

    def __init__(self, folder: Path, mismatch: Mismatch) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        self._mismatch = mismatch
        self._tensors = self._model.state_dict()
        self.vocab_size = int(self._model.config.vocab_size)
        self._versions: deque[dict[str, Tensor]] = deque(maxlen=mismatch.age + 1)

    def update(self, weights: Mapping[str, Tensor]) -> int:
        """Take the trainer's ``weights`` by their names in a checkpoint; how many updates old the copy's now are."""
        new = {name: self._rounded(name, x) for name, x in weights.items()}
        self._versions.append(new)
        for name, values in self._versions[0].items():
            place_of(name, self._tensors).copy_(values)
        return len(self._versions) - 1

    def _rounded(self, name: str, weight: Tensor) -> Tensor:
        rounding = self._mismatch.rounding
        if self._mismatch.blocks and is_quantized(name):
            return dequantize(*quantize(weight))
        if rounding is not None and weight.dim() > 1:
            return rounding(weight)
        return weight.clone()

    @torch.no_grad()
    def sample(
        self, prompts: Tensor, tokens: int, end: int | None, topk: int, generator: torch.Generator
    ) -> Sampled:
        """``tokens`` for each of ``prompts`` [B, S], at temperature 1; fewer where all rows have drawn ``end``."""
        ids, cache = prompts, _Cache(self._mismatch.cache)
        chosen: list[Tensor] = []
        best: list[tuple[Tensor, Tensor]] = []
        ended = torch.zeros(len(ids), dtype=torch.bool)
        with self._changed(generator) as routing:
            step = prompts
            for _ in range(tokens):
                logits = self._model(step, past_key_values=cache).logits[:, -1].float()
                log_probs = logits.log_softmax(-1)
                step = torch.multinomial(log_probs.exp(), 1, generator=generator)
                chosen.append(log_probs.gather(-1, step))
                if topk:
                    best.append(log_probs.topk(topk))
                ids = torch.cat([ids, step], 1)
                if end is not None:
                    ended |= step[:, 0] == end
                    if ended.all():
                        break
        return Sampled(
            ids.numpy(),
            torch.cat(chosen, 1).numpy(),
            torch.stack([i for _, i in best], 1).int().numpy() if topk else None,
            torch.stack([v for v, _ in best], 1).numpy() if topk else None,
            _by_token(routing, len(ids)) if self._mismatch.replays else None,
        )

    @contextmanager
    def _changed(self, generator: torch.Generator) -> Iterator[list[list[Tensor]]]:
        """The mismatch's arithmetic and routing; the experts of each router's calls, in order."""
        routing: list[list[Tensor]] = []
        with ExitStack() as hooks:
            if self._mismatch.blocks:
                hooks.enter_context(activations_in_block_fp8(self._model))
            for name, module in self._model.named_modules():
                if name.endswith("mlp.gate"):
                    calls: list[Tensor] = []
                    routing.append(calls)
                    flips = _Flips(self._mismatch.flips, generator, calls)
                    hooks.callback(module.register_forward_hook(flips).remove)
                elif self._mismatch.activations and isinstance(module, nn.Linear | nn.Embedding):
                    hook = module.register_forward_hook(lambda _, __, out: bfloat16(out))
                    hooks.callback(hook.remove)
            yield routing


class _Cache(DynamicCache):
    """Keys and values as ``rounding`` leaves them; None: as they are."""

    def __init__(self, rounding: Rounding | None) -> None:
        super().__init__()
        self._rounding = rounding

    def update(self, key_states: Tensor, value_states: Tensor, *place: Any, **more: Any) -> Any:
        """What has been stored for a layer so far, with these."""
        if self._rounding is not None:
            key_states, value_states = self._rounding(key_states), self._rounding(value_states)
        return super().update(key_states, value_states, *place, **more)


@dataclass
class _Flips:
    """A router's hook: ``share`` of the tokens take the next best expert in place of their last one."""

    share: float
    generator: torch.Generator
    calls: list[Tensor]

    def __call__(self, gate: Any, _: Any, out: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, scores, chosen = out
        if self.share:
            probabilities = logits.float().softmax(-1)
            best = probabilities.topk(chosen.shape[-1] + 1, -1).indices
            flipped = torch.rand(len(chosen), generator=self.generator) < self.share
            chosen = chosen.clone()
            chosen[flipped] = torch.cat([best[:, :-2], best[:, -1:]], 1)[flipped]
            taken = probabilities.gather(-1, chosen)
            if getattr(gate, "norm_topk_prob", True):
                taken = taken / taken.sum(-1, keepdim=True)
            out = (logits, taken.to(scores.dtype), chosen)
        self.calls.append(chosen)
        return out


def _by_token(routing: list[list[Tensor]], sequences: int) -> np.ndarray:
    """[B, S, L, k] from each layer's calls, [B * tokens of the call, k]."""
    layers = [
        torch.cat([c.reshape(sequences, -1, c.shape[-1]) for c in calls], 1) for calls in routing
    ]
    return torch.stack(layers, 2).numpy().astype(np.uint8)


def place_of(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Where a checkpoint's tensor lies in the model, which keeps all experts of a layer in one."""
    if name in tensors:
        return tensors[name]
    layer, _, rest = name.partition(".experts.")
    number, part, _ = rest.split(".")
    fused = tensors[f"{layer}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"]
    expert = fused[int(number)]
    if part == "down_proj":
        return expert
    gate, up = expert.chunk(2, 0)
    return gate if part == "gate_proj" else up
