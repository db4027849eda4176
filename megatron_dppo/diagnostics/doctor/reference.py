"""The reference: the model by transformers, in float32 and one response at a time, which shares no line with engine or
trainer; and what it becomes where one thing is done in another way.

Legend: S = tokens of a trajectory, N = sampled ones, V = vocabulary, E = experts, L = mixture-of-experts layers.
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

from megatron_dppo.checkpoint_conversion.streaming import megatron_to_hf
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor.rounding import bfloat16
from megatron_dppo.diagnostics.explain.explanation import Policy


class KnownWeights:
    """Weights of a run by version, the steps after which the policy had them.

    ``folders``: Hugging Face folders, or checkpoints, of which a folder under ``converted`` is made once, with the
    configuration of ``start``, the folder that the run began with.
    """

    def __init__(self, folders: Mapping[int, Path], start: Path, converted: Path) -> None:
        self.folders = folders
        self._start, self._converted = start, converted

    def lacking(self, version: int) -> str:
        """What to say where ``version`` is not known."""
        return (
            f"nobody has the weights of version {version}; --weights {version}=FOLDER names them, merged with their "
            f"adapters if they have some (known: {sorted(self.folders)})"
        )

    def reference(self, version: int) -> Reference:
        """The model at ``version``. Raises as ``folder`` and ``Reference``."""
        return Reference(self.folder(version))

    def folder(self, version: int) -> Path:
        """A Hugging Face folder. Raises ValueError where the version is not known, or what its reading raises."""
        if version not in self.folders:
            raise ValueError(self.lacking(version))
        folder = self.folders[version]
        if (folder / "config.json").is_file():
            return folder
        made = self._converted / f"version_{version}"
        if not made.exists():
            megatron_to_hf(folder, made, hf_config=self._start)
        return made


Sampling = Callable[[Tensor], Tensor]
"""Logits [N, V] -> log-probabilities [N, V] of what is sampled from; -inf where nothing is."""


class Reference(Policy):
    """The model in ``folder``. Its alternatives are contexts: outside of them it is as it was.

    Raises OSError or ValueError if transformers cannot load a model from the folder.
    """

    _rows: Tensor
    _rows_of: Callable[[Trajectory], Tensor | None] | None = None
    _cached_by: Reference | None = None
    _rounds_cache = False

    @torch.no_grad()
    def sampled_logits(self, batch: Sequence[Trajectory]) -> list[Tensor]:
        """Float32 [N, V] of each: row i is what the i-th sampled token was drawn from."""
        for trajectory in batch:
            self.check_ids(trajectory)
        branches = [branch for t in batch for branch in t.branches]
        # Behind a sequence's end stands what no position before it can see.
        ids = torch.zeros(len(branches), max(b.length for b in branches), dtype=torch.int64)
        for row, b in zip(ids, branches, strict=True):
            row[: b.length] = torch.from_numpy(b.token_ids.astype(np.int64))
        if self._rows_of is not None:
            self._rows = self._rows_in(ids.shape, branches)
        logits = (
            self._model(ids, past_key_values=self._cache()).logits
            if self._cached_by is None
            else self._after_cache(ids, branches)
        )
        of_branches = iter(
            row[torch.from_numpy(np.flatnonzero(b.loss_mask) - 1)].float()
            for row, b in zip(logits, branches, strict=True)
        )
        return [torch.cat([next(of_branches) for _ in t.branch_lengths]) for t in batch]

    def _ending(self, name: str) -> list[nn.Module]:
        ends = f".{name}"
        return [m for n, m in self._model.named_modules() if f".{n}".endswith(ends)]

    # --- weights

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self._model.named_parameters())

    def exchanged(self, first: str, second: str) -> AbstractContextManager[None]:
        """The tensors whose names hold ``first`` in the place of those with ``second``, and the reverse."""
        pairs = [
            (tensor, self.tensors[name.replace(first, second)])
            for name, tensor in self.tensors.items()
            if first in name and self.tensors[name.replace(first, second)].shape == tensor.shape
        ]
        return _with_data([*((a, b.data) for a, b in pairs), *((b, a.data) for a, b in pairs)])

    def experts_moved(self, ranks: int) -> AbstractContextManager[None]:
        """Each of ``ranks`` has the experts of the next."""
        return self._changed(".experts.", lambda tensor: tensor.roll(len(tensor) // ranks, 0))

    def experts_of(self, other: Reference, rank: int, ranks: int) -> AbstractContextManager[None]:
        """One rank's experts are the other's."""
        theirs = iter([t for name, t in other.tensors.items() if ".experts." in name])

        def mixed(tensor: Tensor) -> Tensor:
            parts = list(tensor.chunk(ranks))
            parts[rank] = next(theirs).detach().chunk(ranks)[rank]
            return torch.cat(parts)

        return self._changed(".experts.", mixed)

    def _changed(
        self, part: str, change: Callable[[Tensor], Tensor]
    ) -> AbstractContextManager[None]:
        """``change`` of the tensors whose names hold ``part``."""
        return _with_data([(t, change(t.data)) for name, t in self.tensors.items() if part in name])

    def tensors_of(self, other: Reference, part: str) -> AbstractContextManager[None]:
        """The tensors whose names hold ``part`` are the other's."""
        return _with_data(
            [(t, other.tensors[name].data) for name, t in self.tensors.items() if part in name]
        )

    # --- arithmetic

    @contextmanager
    def rounded(
        self, part: str = "", *, results: bool = True, to: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[None]:
        """Every linear, embedding and norm whose name holds ``part`` works on numbers ``to`` which are rounded (None:
        bfloat16); ``results``: and gives them."""
        rounding = partial(_rounded, to=to or bfloat16)
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if part in name and not list(module.children()):
                    hook = module.register_forward_pre_hook(lambda _, xs: tuple(map(rounding, xs)))
                    stack.callback(hook.remove)
                    if results:
                        hook = module.register_forward_hook(lambda _, __, out: rounding(out))
                        stack.callback(hook.remove)
            stack.enter_context(self._changed(part, rounding))
            yield

    def in_bfloat16(self) -> AbstractContextManager[None]:
        """Weights and all that is computed, sums of layers and what experts hand on too, are bfloat16."""
        return self._changed("", torch.Tensor.bfloat16)

    def frequencies(self, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        """``change`` of the inverse frequencies of the rotary embedding."""
        return _set(self._rotary, inv_freq=change(self.rotary_frequencies))

    @property
    def rotary_frequencies(self) -> Tensor:
        """Inverse ones, of half as many numbers as a head has."""
        frequencies: Tensor = self._rotary.inv_freq
        return frequencies

    @property
    def _rotary(self) -> Any:
        (module,) = self._ending("rotary_emb")
        return module

    # --- routing

    @property
    def gates(self) -> list[nn.Module]:
        """The routers, layer by layer."""
        return self._ending("mlp.gate") or self._ending("gate")

    @contextmanager
    def routed(self, rows_of: Callable[[Trajectory], Tensor | None]) -> Iterator[None]:
        """Tokens go to the experts of ``rows_of``, int64 [S - 1, L, k]; the last one, those of a row of -1, and of a
        trajectory without rows, by itself."""
        with ExitStack() as hooks:
            for layer, gate in enumerate(self.gates):
                hook = gate.register_forward_hook(
                    lambda gate, _, out, layer=layer: _sent_to(gate, out, self._rows[:, layer])
                )
                hooks.callback(hook.remove)
            hooks.enter_context(_set(self, _rows_of=rows_of))
            yield

    def _rows_in(self, shape: Sequence[int], batch: Sequence[Trajectory]) -> Tensor:
        """int64 [tokens, L, k] of a batch of that shape; -1 where a token goes where it wants."""
        assert self._rows_of is not None
        parts = [self._rows_of(t) for t in batch]
        recorded = next((part.shape[1:] for part in parts if part is not None), None)
        rows = torch.full((*shape, *(recorded or (len(self.gates), 1))), -1)
        for row, part in zip(rows, parts, strict=True):
            if part is not None:
                row[: len(part)] = part
        return rows.flatten(0, 1)

    # --- cache

    def prompts_cached_by(self, other: Reference) -> AbstractContextManager[None]:
        """Keys and values of every prompt, its last token left out, are the other's."""
        return _set(self, _cached_by=other)

    def cached_in_bfloat16(self, *, prompts: bool) -> AbstractContextManager[None]:
        """What is read of keys and values is what a cache in bfloat16 gives back: tokens are decoded from it one after
        another, in place of one pass over the full prefix. ``prompts``: those of a prompt while it is read, too."""
        return _set(self, _rounds_cache=True, _cached_by=None if prompts else self)

    def _cache(self) -> Any:
        """Where the keys and values of a pass go; None: nowhere."""
        return _RoundedCache(config=self._model.config) if self._rounds_cache else None

    def _after_cache(self, ids: Tensor, batch: Sequence[Trajectory]) -> Tensor:
        """Logits [B, S, V]."""
        assert self._cached_by is not None
        logits = []
        for row, t in zip(ids[:, None], batch, strict=True):
            cached = max(1, len(t.prompt_ids) - 1)
            before = self._cached_by._model(row[:, :cached], use_cache=True)
            cache = before.past_key_values
            if self._rounds_cache:
                cache = self._cache()
                for layer, (keys, values, *_) in enumerate(before.past_key_values):
                    cache.update(keys, values, layer)
            after = self._model(row[:, cached:], past_key_values=cache)
            logits.append(torch.cat([before.logits, after.logits], 1))
        return torch.cat(logits)


class _RoundedCache(DynamicCache):
    """transformers' own, in bfloat16."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rounded = bfloat16(key_states), bfloat16(value_states)
        return super().update(*rounded, layer_idx, *args, **kwargs)


@contextmanager
def _set(target: Any, **values: Any) -> Iterator[None]:
    """Inside, the attributes of ``target`` have ``values``; afterwards, what they had before."""
    values_before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in values_before.items():
            setattr(target, name, value)


@contextmanager
def _with_data(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, each first tensor has the data that stands beside it."""
    with ExitStack() as stack:
        for tensor, data in pairs:
            stack.enter_context(_set(tensor, data=data))
        yield


def _rounded(values: Any, to: Callable[[Tensor], Tensor]) -> Any:
    is_real = isinstance(values, Tensor) and values.is_floating_point()
    return to(values) if is_real else values


def _sent_to(gate: nn.Module, answer: tuple[Tensor, Tensor, Tensor], rows: Tensor) -> Any:
    """The router's answer with experts as in ``rows`` [tokens, k], where they are not -1."""
    logits, scores, chosen = answer
    chosen = torch.where(rows < 0, chosen, rows)
    taken = logits.float().softmax(-1).gather(-1, chosen)
    # Mixtral always shares them out anew, and has no such setting.
    if getattr(gate, "norm_topk_prob", True):
        taken = taken / taken.sum(-1, keepdim=True)
    return logits, taken.to(scores.dtype), chosen


def at_temperature(temperature: float) -> Sampling:
    """softmax(logits / temperature)."""
    return lambda logits: (logits.double() / temperature).log_softmax(-1)


def nucleus(temperature: float, top_p: float) -> Sampling:
    """The fewest tokens whose mass is at least ``top_p``, shared out anew."""

    def sampling(logits: Tensor) -> Tensor:
        ordered, order = at_temperature(temperature)(logits).sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        kept = torch.where(before < top_p, ordered, -torch.inf).log_softmax(-1)
        return torch.empty_like(kept).scatter_(-1, order, kept)

    return sampling


def most_probable(temperature: float, count: int) -> Sampling:
    """The ``count`` most probable tokens, shared out anew."""

    def sampling(logits: Tensor) -> Tensor:
        least = logits.topk(count, -1).values[:, -1:]
        kept = logits.double().masked_fill(logits < least, -torch.inf)
        return at_temperature(temperature)(kept)

    return sampling


def normaliser_of_first(temperature: float, count: int) -> Sampling:
    """A sum of exponentials that lacks what follows the first ``count`` ids: as if a rank were forgotten."""

    def sampling(logits: Tensor) -> Tensor:
        scaled = logits.double() / temperature
        return scaled - scaled[:, :count].logsumexp(-1, keepdim=True)

    return sampling


def first_tokens(temperature: float, count: int) -> Sampling:
    """The first ``count`` ids of the vocabulary alone."""
    without_last = normaliser_of_first(temperature, count)

    def sampling(logits: Tensor) -> Tensor:
        kept = without_last(logits)
        kept[:, count:] = -torch.inf
        return kept

    return sampling


Change = Callable[[Reference], AbstractContextManager[None]]
