"""Compute reference probabilities with transformers in float32, without a change or with one thing changed.

The reference shares no code with engine or trainer. Each change simulates one possible cause of a difference.

Legend: B = sequences of a batch, S = tokens of a trajectory, N = sampled tokens of a trajectory, V = vocabulary,
L = mixture-of-experts layers, k = experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from megatron_dppo.block_fp8 import BlockFp8, dequantize, quantize
from megatron_dppo.convert.streaming import megatron_to_hf
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor.rounding import activations_in_block_fp8, bfloat16
from megatron_dppo.diagnostics.explain.explanation import Policy, as_int64
from megatron_dppo.model.quantization import is_quantized

BlocksOf = Callable[[str, int, BlockFp8], BlockFp8]
"""(name of a tensor, number of an expert, values and scales of a matrix) -> the values and scales to use.

The matrix is the expert's part of the tensor. If a tensor has no experts, the matrix is the tensor, and the number
is 0."""


class KnownWeights:
    """Weights of a run by version; a version is the number of steps after which the policy had these weights.

    Args:
        folders: Hugging Face folders or checkpoints, by version.
        start: the Hugging Face folder that the run began with; its configuration is used for converted checkpoints.
        converted: folder for converted checkpoints; each is converted once, when it is first needed.
    """

    def __init__(self, folders: Mapping[int, Path], start: Path, converted: Path) -> None:
        self.folders = folders
        self._start = start
        self._converted = converted

    def unknown_text(self, version: int) -> str:
        """Return the message that the weights of ``version`` are not known."""
        return (
            f"the weights of version {version} are not known; --weights {version}=FOLDER names them, merged with their "
            f"adapters if they have some (known versions: {sorted(self.folders)})"
        )

    def reference(self, version: int) -> Reference:
        """Load the model with the weights of ``version``. Raises what ``folder`` and ``Reference`` raise."""
        return Reference(self.folder(version))

    def folder(self, version: int) -> Path:
        """Return the Hugging Face folder of ``version``, converted from a checkpoint if necessary.

        Raises ValueError if the version is not known, and what the conversion raises.
        """
        if version not in self.folders:
            raise ValueError(self.unknown_text(version))
        folder = self.folders[version]
        if (folder / "config.json").is_file():
            return folder
        converted_folder = self._converted / f"version_{version}"
        if not converted_folder.exists():
            megatron_to_hf(folder, converted_folder, hf_config=self._start)
        return converted_folder


class Reference(Policy):
    """The model in ``folder``. Each change of the model is a context manager that undoes the change when it exits.

    Raises OSError or ValueError if transformers cannot load a model from the folder.

    The changes set these private attributes:
        _rows_of: function that returns rows [L, k] of experts for a trajectory's tokens; None: the routers choose.
        _rows: the rows of all tokens of the running pass, int64 [B * S, L, k].
        _cached_by: the model that reads each prompt in a first pass; its keys and values serve the pass over the
            response. None: this model reads prompt and response in one pass.
        _rounds_cache: whether keys and values are rounded to bfloat16.
    """

    _rows: Tensor
    _rows_of: Callable[[Trajectory], Tensor | None] | None = None
    _cached_by: Reference | None = None
    _rounds_cache = False

    @torch.no_grad()
    def sampled_logits(self, batch: Sequence[Trajectory]) -> list[Tensor]:
        """Compute float32 logits [N, V] of each trajectory; row i predicts the i-th sampled token."""
        for trajectory in batch:
            self.check_ids(trajectory)
        branches = [branch for t in batch for branch in t.branches]
        # Pad with id 0 at the end: attention is causal, so no real position sees the padding.
        ids = torch.zeros(len(branches), max(b.length for b in branches), dtype=torch.int64)
        for row, b in zip(ids, branches, strict=True):
            row[: b.length] = as_int64(b.token_ids)
        if self._rows_of is not None:
            self._rows = self._rows_in(ids.shape, branches)
        if self._cached_by is None:
            logits = self._model(ids, past_key_values=self._cache()).logits
        else:
            logits = self._logits_in_two_passes(ids, branches)
        branch_logits: list[Tensor] = []
        for row, branch in zip(logits, branches, strict=True):
            # Row i of the logits predicts token i + 1.
            sampled_rows = torch.from_numpy(np.flatnonzero(branch.loss_mask) - 1)
            branch_logits.append(row[sampled_rows].float())
        logits_by_response: list[Tensor] = []
        first_branch = 0
        for trajectory in batch:
            end = first_branch + len(trajectory.branch_lengths)
            logits_by_response.append(torch.cat(branch_logits[first_branch:end]))
            first_branch = end
        return logits_by_response

    def _modules_ending_in(self, name: str) -> list[nn.Module]:
        """Return the modules whose dotted names end with ``name``."""
        suffix = f".{name}"
        modules: list[nn.Module] = []
        for module_name, module in self._model.named_modules():
            if f".{module_name}".endswith(suffix):
                modules.append(module)
        return modules

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters, by name."""
        return dict(self._model.named_parameters())

    def exchanged(self, first_module: str, second_module: str) -> AbstractContextManager[None]:
        """Exchange the tensors of two modules in every layer: ``first_module`` and ``second_module``.

        Tensors whose shapes differ stay as they are.
        """
        replacements: list[tuple[Tensor, Tensor]] = []
        for name, tensor in self.tensors.items():
            if first_module not in name:
                continue
            other = self.tensors[name.replace(first_module, second_module)]
            if other.shape == tensor.shape:
                replacements += [(tensor, other.data), (other, tensor.data)]
        return _with_data(replacements)

    def experts_moved(self, ranks: int) -> AbstractContextManager[None]:
        """Give each of ``ranks`` expert-parallel ranks the experts of the next rank."""

        def moved(tensor: Tensor) -> Tensor:
            experts_of_rank = len(tensor) // ranks
            return tensor.roll(-experts_of_rank, 0)

        return self._changed(".experts.", moved)

    def experts_from(self, other: Reference, rank: int, ranks: int) -> AbstractContextManager[None]:
        """Replace the experts of ``rank``, one of ``ranks`` expert-parallel ranks, by the same experts of ``other``."""
        other_tensors = iter([t for name, t in other.tensors.items() if ".experts." in name])

        # ``_changed`` calls this function for the tensors of experts in the order of ``other_tensors``.
        def mixed(tensor: Tensor) -> Tensor:
            parts = list(tensor.chunk(ranks))
            parts[rank] = next(other_tensors).detach().chunk(ranks)[rank]
            return torch.cat(parts)

        return self._changed(".experts.", mixed)

    def _changed(
        self, part: str, change: Callable[[Tensor], Tensor]
    ) -> AbstractContextManager[None]:
        """Apply ``change`` to the tensors whose names contain ``part``."""
        tensors = [tensor for name, tensor in self.tensors.items() if part in name]
        return _with_data([(tensor, change(tensor.data)) for tensor in tensors])

    def tensors_from(self, other: Reference, part: str) -> AbstractContextManager[None]:
        """Replace the tensors whose names contain ``part`` by the tensors of the same names in the model ``other``."""
        names = [name for name in self.tensors if part in name]
        return _with_data([(self.tensors[name], other.tensors[name].data) for name in names])

    @contextmanager
    def rounded(
        self, part: str = "", *, results: bool = True, to: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[None]:
        """Round the inputs and weights of every linear, embedding and norm whose name contains ``part``.

        Args:
            part: part of the module names; empty for all modules.
            results: whether to round the outputs of these modules too.
            to: the rounding function; None for bfloat16.
        """
        rounding = partial(_rounded, to=to or bfloat16)
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if part in name and not list(module.children()):
                    hook = module.register_forward_pre_hook(
                        lambda _, inputs: tuple(map(rounding, inputs))
                    )
                    stack.callback(hook.remove)
                    if results:
                        hook = module.register_forward_hook(lambda _, __, output: rounding(output))
                        stack.callback(hook.remove)
            stack.enter_context(self._changed(part, rounding))
            yield

    @contextmanager
    def in_block_fp8(self, blocks_of: BlocksOf | None = None) -> Iterator[None]:
        """Round the matrices that an engine has in FP8, and their inputs, as with ``engine.quantization: fp8``.

        Args:
            blocks_of: returns the values and scales to use; None: the matrix's own values and scales.
        """
        replacements: list[tuple[Tensor, Tensor]] = []
        for name, tensor in self.tensors.items():
            if tensor.dim() == 3 and ".experts." in name:
                experts: list[Tensor] = []
                for expert, weight in enumerate(tensor.data):
                    experts.append(_in_block_fp8(weight, name, expert, blocks_of))
                replacements.append((tensor, torch.stack(experts)))
            elif is_quantized(name):
                replacements.append((tensor, _in_block_fp8(tensor.data, name, 0, blocks_of)))
        with ExitStack() as stack:
            stack.enter_context(activations_in_block_fp8(self._model))
            stack.enter_context(_with_data(replacements))
            yield

    def block_scales(self, name: str, expert: int) -> Tensor:
        """Return the FP8 scales of the tensor ``name``, or of one expert in it."""
        matrix = self.tensors[name].data
        if matrix.dim() == 3:
            matrix = matrix[expert]
        return quantize(matrix).scales

    def in_bfloat16(self) -> AbstractContextManager[None]:
        """Compute everything in bfloat16: weights, activations, the sums of layers and the outputs of experts."""
        return self._changed("", torch.Tensor.bfloat16)

    def frequencies(self, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        """Apply ``change`` to the inverse frequencies of the rotary embedding."""
        return _set(self._rotary, inv_freq=change(self.rotary_frequencies))

    @property
    def rotary_frequencies(self) -> Tensor:
        """The inverse frequencies of the rotary embedding, [half the size of a head]."""
        frequencies: Tensor = self._rotary.inv_freq
        return frequencies

    @property
    def _rotary(self) -> Any:
        (module,) = self._modules_ending_in("rotary_emb")
        return module

    @property
    def gates(self) -> list[nn.Module]:
        """The routers, in the order of their layers."""
        for name in ("mlp.gate", "gate", "mlp.router"):
            routers = self._modules_ending_in(name)
            if routers:
                return routers
        return []

    @contextmanager
    def routed(self, rows_of: Callable[[Trajectory], Tensor | None]) -> Iterator[None]:
        """Route tokens to the experts that ``rows_of`` returns for a trajectory, int64 [S - 1, L, k].

        The router chooses the experts of a trajectory's last token and of rows of -1. If ``rows_of`` returns None for a
        trajectory, the router chooses the experts of all its tokens.
        """
        with ExitStack() as hooks:
            for layer, gate in enumerate(self.gates):
                hook = gate.register_forward_hook(
                    lambda gate, _, out, layer=layer: self._with_rows(gate, out, layer)
                )
                hooks.callback(hook.remove)
            hooks.enter_context(_set(self, _rows_of=rows_of))
            yield

    def _with_rows(self, gate: nn.Module, output: tuple[Tensor, Tensor, Tensor], layer: int) -> Any:
        """Return the router's ``output`` with the experts that ``_rows`` has for ``layer``, and with their weights.

        A row of -1 keeps the router's choice.
        """
        logits, router_weights, router_experts = output
        rows = self._rows[:, layer]
        experts = torch.where(rows < 0, router_experts, rows)
        all_weights = logits.float().softmax(-1)
        if self._has_sigmoid_routers:
            all_weights = logits.float().sigmoid()
        weights = all_weights.gather(-1, experts)
        # Routers without the attribute always normalise the weights.
        if getattr(gate, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        for name in ("routed_scaling_factor", "router_scaling_factor"):
            weights = weights * getattr(gate, name, 1)
        return logits, weights.to(router_weights.dtype), experts

    @cached_property
    def _has_sigmoid_routers(self) -> bool:
        """Whether the weights of experts are sigmoids. Only routers with sigmoids have a correction bias."""
        names = [name for name, _ in self._model.named_buffers()]
        return any(name.endswith("e_score_correction_bias") for name in names)

    def _rows_in(self, shape: Sequence[int], batch: Sequence[Trajectory]) -> Tensor:
        """Return the experts of all tokens of a padded batch, int64 [B * S, L, k]; -1 where the router itself chooses.

        ``shape``: (B, padded S) of the batch.
        """
        assert self._rows_of is not None
        parts = [self._rows_of(t) for t in batch]
        # A row is [L, k]. If no trajectory has a recording, all rows are -1, and k = 1 is enough.
        row_shape = (len(self.gates), 1)
        for part in parts:
            if part is not None:
                row_shape = (part.shape[1], part.shape[2])
                break
        rows = torch.full((*shape, *row_shape), -1)
        for row, part in zip(rows, parts, strict=True):
            if part is not None:
                row[: len(part)] = part
        return rows.flatten(0, 1)

    def prompts_cached_by(self, other: Reference) -> AbstractContextManager[None]:
        """Let the model ``other`` compute keys and values of every prompt, except for the prompt's last token."""
        return _set(self, _cached_by=other)

    def cached_in_bfloat16(self, *, prompts: bool) -> AbstractContextManager[None]:
        """Round keys and values to bfloat16, like an engine that decodes from a cache in bfloat16.

        If ``prompts`` is true, prompt and response are one pass, and all of it reads rounded keys and values. If not,
        the prompt has its own pass, which reads unrounded keys and values. Only the pass over the response reads them
        rounded.
        """
        return _set(self, _rounds_cache=True, _cached_by=None if prompts else self)

    def _cache(self) -> Any:
        """Return the cache for the keys and values of a pass; None if they are not rounded."""
        if self._rounds_cache:
            return _RoundedCache(config=self._model.config)
        return None

    def _logits_in_two_passes(self, ids: Tensor, batch: Sequence[Trajectory]) -> Tensor:
        """Compute logits [B, S, V] in two passes for each sequence.

        The model ``_cached_by`` computes the first pass, over the prompt without its last token. This model computes
        the second pass, over the rest, with the keys and values of the first pass. The prompt's last token is in the
        second pass, because its logits predict the first sampled token. So this model computes all logits that matter.
        A prompt of one token is an exception: the first pass needs a token, so it reads the whole prompt.
        """
        assert self._cached_by is not None
        logits = []
        for row, t in zip(ids[:, None], batch, strict=True):
            cached_tokens = max(1, len(t.prompt_ids) - 1)
            prompt_pass = self._cached_by._model(row[:, :cached_tokens], use_cache=True)
            cache = prompt_pass.past_key_values
            if self._rounds_cache:
                cache = self._cache()
                for number, layer in enumerate(prompt_pass.past_key_values.layers):
                    if hasattr(layer, "keys"):
                        cache.update(layer.keys, layer.values, number)
                    else:
                        # The states of a delta net are not rounded.
                        cache.layers[number] = layer
            response_pass = self._model(row[:, cached_tokens:], past_key_values=cache)
            logits.append(torch.cat([prompt_pass.logits, response_pass.logits], 1))
        return torch.cat(logits)


class _RoundedCache(DynamicCache):
    """A ``DynamicCache`` that rounds keys and values to bfloat16."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rounded = bfloat16(key_states), bfloat16(value_states)
        return super().update(*rounded, layer_idx, *args, **kwargs)


@contextmanager
def _set(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of ``target`` to ``values`` inside the context, and restore them at its end."""
    values_before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in values_before.items():
            setattr(target, name, value)


def _in_block_fp8(weight: Tensor, name: str, expert: int, blocks_of: BlocksOf | None) -> Tensor:
    blocks = quantize(weight)
    if blocks_of is not None:
        blocks = blocks_of(name, expert, blocks)
    return dequantize(blocks.values, blocks.scales, weight.dtype)


@contextmanager
def _with_data(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Replace the data of the first tensor of each pair by the second inside the context."""
    with ExitStack() as stack:
        for tensor, data in pairs:
            stack.enter_context(_set(tensor, data=data))
        yield


def _rounded(values: Any, to: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``to`` to a tensor of real numbers; return any other value unchanged."""
    if isinstance(values, Tensor) and values.is_floating_point():
        return to(values)
    return values


Change = Callable[[Reference], AbstractContextManager[None]]
