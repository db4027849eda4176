"""A copy of the policy that samples in an engine's place, with a mismatch of ``mismatches.py``.

The copy is the model of transformers, in float32 and with a cache of keys and values. A mismatch changes its weights,
its arithmetic, its age or its routing. The changed copy samples the tokens, and mu is always its distribution.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from examples.arena.mismatches import Mismatch, Rounding
from megatron_dppo.block_fp8 import dequantize, quantize
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor.rounding import activations_in_block_fp8, bfloat16
from megatron_dppo.model.quantization import is_quantized


@dataclass(frozen=True)
class Sampled:
    """Responses to B prompts of S tokens, of N tokens each.

    ``ids``: int64 [B, S + N]. ``log_probs``: log mu, fp32 [B, N]. ``topk_ids``, ``topk_log_probs``: [B, N, K] or None.
    ``experts``: [B, S + N - 1, L, k], or None without router replay.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    topk_ids: np.ndarray | None = None
    topk_log_probs: np.ndarray | None = None
    experts: np.ndarray | None = None


class Teacher:
    """The model in ``folder``, in float32. ``topk``: K of its scores; 0: only the sampled tokens are scored."""

    def __init__(self, folder: Path, topk: int) -> None:
        self._model = _model_of(folder)
        self._topk = topk

    @torch.no_grad()
    def scored(self, trajectories: Sequence[Trajectory], ids: np.ndarray) -> list[Trajectory]:
        """Return the trajectories with the teacher's columns. ``ids`` [B, S + N]: their tokens and padding after them.

        The padding has no effect on the scores of the tokens before it.
        """
        logits = self._model(torch.from_numpy(ids)).logits[:, :-1].float()
        log_probs = logits.log_softmax(-1)
        scored: list[Trajectory] = []
        for row, trajectory in enumerate(trajectories):
            sampled = np.flatnonzero(trajectory.loss_mask)
            # The logits at a position are of the next token.
            own = log_probs[row, sampled - 1]
            tokens = torch.from_numpy(ids[row, sampled])
            columns = {"teacher_log_probs": own.gather(1, tokens[:, None])[:, 0].numpy()}
            if self._topk:
                best = own.topk(self._topk)
                columns["teacher_topk_ids"] = best.indices.int().numpy()
                columns["teacher_topk_log_probs"] = best.values.numpy()
            scored.append(trajectory.with_columns(**columns))
        return scored


def _model_of(folder: Path) -> PreTrainedModel:
    """Return the model of a Hugging Face folder, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


class PolicyCopy:
    """The model in ``folder`` under ``mismatch``. ``update`` gives it the trainer's weights."""

    def __init__(self, folder: Path, mismatch: Mismatch) -> None:
        self._model = _model_of(folder)
        self._mismatch = mismatch
        self._tensors = self._model.state_dict()
        self.vocab_size = int(self._model.config.vocab_size)
        self._versions: deque[dict[str, Tensor]] = deque(maxlen=mismatch.age + 1)

    def update(self, weights: Mapping[str, Tensor]) -> int:
        """Add the trainer's ``weights``, by their names in a checkpoint, and copy the weights of the mismatch's age.

        Returns how many updates old the copied weights are.
        """
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
        """Sample ``tokens`` tokens for each of ``prompts`` [B, S], at temperature 1.

        Stop earlier if every response has the token ``end``.
        """
        ids = prompts
        cache = _Cache(self._mismatch.cache)
        sampled_log_probs: list[Tensor] = []
        topk_ids: list[Tensor] = []
        topk_log_probs: list[Tensor] = []
        ended = torch.zeros(len(ids), dtype=torch.bool)
        with self._changed(generator) as routing:
            step = prompts
            for _ in range(tokens):
                logits = self._model(step, past_key_values=cache).logits[:, -1].float()
                log_probs = logits.log_softmax(-1)
                step = torch.multinomial(log_probs.exp(), 1, generator=generator)
                sampled_log_probs.append(log_probs.gather(-1, step))
                if topk:
                    best = log_probs.topk(topk)
                    topk_ids.append(best.indices)
                    topk_log_probs.append(best.values)
                ids = torch.cat([ids, step], 1)
                if end is not None:
                    ended |= step[:, 0] == end
                    if ended.all():
                        break
        return Sampled(
            ids.numpy(),
            torch.cat(sampled_log_probs, 1).numpy(),
            torch.stack(topk_ids, 1).int().numpy() if topk else None,
            torch.stack(topk_log_probs, 1).numpy() if topk else None,
            _by_token(routing, len(ids)) if self._mismatch.replays else None,
        )

    @contextmanager
    def _changed(self, generator: torch.Generator) -> Iterator[list[list[Tensor]]]:
        """Apply the mismatch's arithmetic and routing while the block runs.

        Yield a list for each router. Each call of the router appends its experts to the list.
        """
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
                    hook = module.register_forward_hook(_round_output)
                    hooks.callback(hook.remove)
            yield routing


def _round_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return bfloat16(output)


class _Cache(DynamicCache):
    """A cache that stores keys and values after ``rounding``; None: unchanged."""

    def __init__(self, rounding: Rounding | None) -> None:
        super().__init__()
        self._rounding = rounding

    def update(self, key_states: Tensor, value_states: Tensor, *place: Any, **more: Any) -> Any:
        """Store a layer's new keys and values; return all that are stored for this layer."""
        if self._rounding is not None:
            key_states = self._rounding(key_states)
            value_states = self._rounding(value_states)
        return super().update(key_states, value_states, *place, **more)


@dataclass
class _Flips:
    """A hook on a router: ``share`` of the tokens use the next best expert instead of their last expert."""

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
            # ``best`` has one expert too many. Leave out the last expert but one, which the router has chosen last.
            without_last = torch.cat([best[:, :-2], best[:, -1:]], 1)
            chosen[flipped] = without_last[flipped]
            new_scores = probabilities.gather(-1, chosen)
            if getattr(gate, "norm_topk_prob", True):
                new_scores = new_scores / new_scores.sum(-1, keepdim=True)
            out = (logits, new_scores.to(scores.dtype), chosen)
        self.calls.append(chosen)
        return out


def _by_token(routing: list[list[Tensor]], sequences: int) -> np.ndarray:
    """Return the experts [B, S, L, k] from each layer's list of calls. A call has [B * tokens of the call, k]."""
    layers = []
    for calls in routing:
        by_sequence = [experts.reshape(sequences, -1, experts.shape[-1]) for experts in calls]
        layers.append(torch.cat(by_sequence, 1))
    return torch.stack(layers, 2).numpy().astype(np.uint8)


def place_of(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the part of the model's tensors that a checkpoint's tensor ``name`` fills.

    In the model, all experts of a layer share a tensor, and gate_proj and up_proj share a tensor.
    """
    if name in tensors:
        return tensors[name]
    layer, _, rest = name.partition(".experts.")
    number, part, _ = rest.split(".")
    fused_name = "down_proj" if part == "down_proj" else "gate_up_proj"
    expert = tensors[f"{layer}.experts.{fused_name}"][int(number)]
    if part == "down_proj":
        return expert
    gate, up = expert.chunk(2, 0)
    return gate if part == "gate_proj" else up
