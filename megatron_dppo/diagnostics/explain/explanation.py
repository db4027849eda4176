"""Explain the effect of a mask on each response token, from the mask's inputs and decisions.

In this module, transformers computes pi from given weights. If the weights that sampled the batch are given too, it
also computes pi', and TopK(mu) if the batch has none. ``seen_step.py`` explains a step with the values that its loss
computed.

Legend: S = tokens of a trajectory, N = sampled tokens of a response, V = vocabulary, K = ids of TopK(mu).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from megatron_dppo.algorithms import divergence, rules
from megatron_dppo.algorithms.algorithm import Algorithm
from megatron_dppo.algorithms.decisions import Decisions, decide
from megatron_dppo.algorithms.inputs import TokenInputs, rollout
from megatron_dppo.algorithms.rules import importance_ratio
from megatron_dppo.algorithms.table import NEGATIVE_THRESHOLDS, Preset
from megatron_dppo.algorithms.token_metrics import PPO_CLIP, token_metrics
from megatron_dppo.data.packing import pack
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.metrics import sums
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.table import METRICS
from megatron_dppo.trainer.token_loss import inputs_from
from megatron_dppo.vocab_parallel import policy_stats

_UNKNOWN = (metric_names.GAP_STALE, metric_names.TOPK_MASS, metric_names.NONFINITE)
"""Metrics that a saved batch does not determine. They need data that the batch may lack: the weights that sampled the
responses, the engine's Top-K, or every value that the loss tested for finiteness."""


def as_int64(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def as_float64(values: np.ndarray) -> Tensor:
    """Convert log-probabilities: the differences that matter are as small as float32's rounding."""
    return torch.from_numpy(values.astype(np.float64))


def compared_metrics() -> list[str]:
    """Return the metrics that the command computes again from a batch's tokens and compares with the run's records."""
    names: list[str] = []
    for name, row in METRICS.items():
        is_of_tokens = name.startswith(("policy/", "mask/")) or row.measure is not None
        if is_of_tokens and name not in _UNKNOWN:
            names.append(name)
    return names


@dataclass(frozen=True)
class Token:
    """One response token.

    ``mu``, ``pi`` and ``recomputed`` are probabilities. The divergences compare pi with mu. KL and entropy are in nats.
    None means that a value is not known.
    """

    response: int
    """Position of the response in the batch."""
    position: int
    """Position of the token in the response, from 0."""
    mini_batch: int
    """Number of the step's mini-batch that holds the response, from 1."""
    token_id: int
    text: str
    advantage: float
    mu: float
    pi: float
    ratio: float
    """pi / mu."""
    weight: float
    """min(w, C): the algorithm's weight w, cut to its cap C. If the token trains, the gradient of log pi is multiplied
    by this value and by A."""
    binary_tv: float
    binary_kl: float
    topk_tv: float | None
    topk_kl: float | None
    exact_tv: float | None
    exact_kl: float | None
    recomputed: float | None
    """pi': probability by the trainer or by transformers, with the rollout's weights. pi' - mu is the mismatch with the
    engine."""
    entropy: float
    threshold: str
    """The algorithm's bounds for a token with this sign of A, as text."""
    trains: bool
    ppo_trains: bool
    """Whether the token would train under PPO's Clip-Higher."""


@dataclass(frozen=True)
class Response:
    """A response with its explained tokens and the sums of the package's metrics over them."""

    index: int
    trajectory: Trajectory
    prompt: str
    tokens: tuple[Token, ...]
    metrics: sums.MetricSums


def response_of(
    index: int,
    mini_batch: int,
    trajectory: Trajectory,
    algorithm: Algorithm,
    columns: Mapping[str, Tensor | None],
    metrics: sums.MetricSums,
    texts: TokenTexts,
) -> Response:
    """Build the explained response at ``index`` of the batch.

    ``columns`` has fields of ``Token`` by name, one value for each token, [N]; None if the values are not known.
    """
    values: dict[str, list[Any]] = {}
    for name, column in columns.items():
        values[name] = [None] * trajectory.sampled if column is None else column.tolist()
    thresholds = {positive: threshold_text(algorithm, positive) for positive in (True, False)}
    advantages = trajectory.advantages.tolist()
    tokens: list[Token] = []
    for position, token_id in enumerate(trajectory.response_ids.tolist()):
        token_values = {name: column[position] for name, column in values.items()}
        token = Token(
            response=index,
            position=position,
            mini_batch=mini_batch,
            token_id=token_id,
            text=texts[token_id],
            advantage=advantages[position],
            threshold=thresholds[advantages[position] > 0],
            **token_values,
        )
        tokens.append(token)
    prompt = texts.joined(trajectory.prompt_ids.tolist())
    return Response(index, trajectory, prompt, tuple(tokens), metrics)


def token_columns(inputs: TokenInputs, decisions: Decisions) -> dict[str, Tensor | None]:
    """Compute fields of ``Token`` for every row of ``inputs``, by name; None for divergences without their inputs."""
    pi = inputs.log_probs
    mu = inputs.rollout_log_probs
    recomputed = inputs.recomputed_log_probs
    topk_tv = topk_kl = None
    log_pi = inputs.topk_log_probs
    log_mu = inputs.rollout_topk_log_probs
    valid = inputs.topk_valid
    if log_pi is not None and log_mu is not None and valid is not None:
        topk_tv = divergence.topk_tv(log_pi, log_mu, valid)
        topk_kl = divergence.topk_kl(log_pi, log_mu, valid)
    return {
        "mu": mu.exp(),
        "pi": pi.exp(),
        "ratio": importance_ratio(inputs, rollout),
        "weight": decisions.capped,
        "binary_tv": divergence.binary_tv(pi, mu),
        "binary_kl": divergence.binary_kl(pi, mu),
        "topk_tv": topk_tv,
        "topk_kl": topk_kl,
        "recomputed": None if recomputed is None else recomputed.exp(),
        "entropy": inputs.entropy,
        "trains": decisions.trains,
        "ppo_trains": rules.ratio_clip(inputs, rollout, **PPO_CLIP),
    }


def threshold_text(algorithm: Algorithm, positive: bool) -> str:
    """Return the algorithm's bounds for A > 0 (``positive``) or A < 0, as text; empty if there is no bound."""
    numbers = dict(algorithm.numbers)
    # If A < 0, the number for negative A replaces the number for both signs.
    for name, negative_name in NEGATIVE_THRESHOLDS.items():
        threshold = numbers.pop(negative_name, None)
        if threshold is not None and not positive:
            numbers[name] = threshold
    bounds: list[str] = []
    for name, value in numbers.items():
        text = _bound_text(algorithm.preset, name, value, positive)
        if text is not None:
            bounds.append(text)
    anchor = ""
    if algorithm.needs_recomputed and bounds:
        anchor = " (against pi')"
    return ", ".join(bounds) + anchor


def _bound_text(preset: Preset, name: str, value: float, positive: bool) -> str | None:
    """Return the number ``name`` as a bound in words; None if it bounds nothing for this sign of A."""
    option = preset.option(name)
    if option.bound is not None:
        return option.bound(value, positive)
    # A row of a user's module may have a threshold without words for it: show its name.
    if name in preset.options and option.role in ("mask", "both"):
        return f"{name} {value:g}"
    return None


class TokenTexts:
    """Map a token id to its text.

    If a token is only a part of a character, its text is its name in the vocabulary. If the tokenizer does not know an
    id, its text has the number.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._text(token_id)
        return self._texts[token_id]

    def joined(self, token_ids: list[int]) -> str:
        """Return the text of a whole sequence, special tokens included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _text(self, token_id: int) -> str:
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        # A token that is a part of a character cannot be decoded: its name says more than the replacement character.
        if text and "\ufffd" not in text:
            return text
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return f"<id {token_id}>"
        return str(name)


DEFAULT_TOPK = 20
"""K if neither the batch nor the algorithm sets it. The value is the paper's."""


class Policy:
    """The model in ``folder``, computed by transformers in float32.

    Raises OSError or ValueError if transformers cannot load a model from the folder.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder}: expected a Hugging Face folder, found no config.json")
        disable_progress_bar()
        self.folder = folder
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
        ).eval()
        self.vocab_size = int(self._model.config.vocab_size)

    @torch.no_grad()
    def logits(self, trajectory: Trajectory) -> Tensor:
        """Compute logits, float32 [S, V]; row t predicts token t + 1 of its branch.

        Raises ValueError for an id outside the model's vocabulary.
        """
        self.check_ids(trajectory)
        ids = [as_int64(b.token_ids)[None] for b in trajectory.branches]
        return torch.cat([self._model(branch_ids).logits[0].float() for branch_ids in ids])

    def check_ids(self, trajectory: Trajectory) -> None:
        """Raise ValueError for an id outside the model's vocabulary."""
        largest_id = int(trajectory.token_ids.max())
        if largest_id >= self.vocab_size:
            raise ValueError(
                f"{self.folder}: the batch holds token id {largest_id}, but this model's "
                f"vocabulary has {self.vocab_size}: it is another model's batch"
            )


def explain_response(
    index: int,
    mini_batch: int,
    trajectory: Trajectory,
    algorithm: Algorithm,
    logits: Tensor,
    rollout_logits: Tensor | None,
    *,
    temperature: float,
    texts: TokenTexts,
) -> Response:
    """Explain the effect of ``algorithm`` on each token of a response.

    Args:
        index, mini_batch: position of the response in the batch, and number of its mini-batch, from 1.
        trajectory: the response.
        algorithm: the algorithm whose mask and weight are explained.
        logits: logits of the policy that gives pi, [S, V].
        rollout_logits: logits of the weights that sampled the response, [S, V]. They give pi', the exact divergences,
            and TopK(mu) if the batch has none. These logits do not serve the algorithms ``dppo-exact-...``:
            those need the engine's own mu of the whole vocabulary.
        temperature: temperature of the rollout.
        texts: texts of token ids.

    Raises:
        ValueError: The algorithm needs data that is missing.
    """
    require_independent_responses(algorithm)
    vocab_size = logits.shape[1]
    # log pi' at every id, [N, V].
    log_recomputed = None
    if rollout_logits is not None:
        if rollout_logits.shape != logits.shape:
            raise ValueError(
                f"the rollout policy's vocabulary has {rollout_logits.shape[1]} tokens, the "
                f"policy's {vocab_size}: they are different models"
            )
        predicting_rows = torch.from_numpy(np.flatnonzero(trajectory.loss_mask) - 1)
        log_recomputed = (rollout_logits[predicting_rows] / temperature).log_softmax(-1)
    complete_trajectory = _with_recomputed(trajectory, log_recomputed)
    complete_trajectory = _with_topk(complete_trajectory, algorithm, vocab_size, log_recomputed)
    batch = pack([complete_trajectory])
    topk_ids = batch.columns.get("topk_ids")
    stats = policy_stats(
        logits,
        batch.target_ids,
        vocab_size=vocab_size,
        temperature=temperature,
        topk_ids=None if topk_ids is None else topk_ids.long(),
        with_entropy=True,
        with_squares=algorithm.needs_sum_squares,
    )
    inputs = inputs_from(stats, batch)
    if algorithm.needs_recomputed and inputs.recomputed_log_probs is None:
        raise ValueError(
            f"{algorithm.name} compares pi with log-probabilities recomputed at the rollout's "
            "weights: give these weights with --rollout-policy"
        )
    decisions = decide(algorithm, inputs)
    columns = token_columns(inputs, decisions)
    columns |= _exact(columns, complete_trajectory, logits, rollout_logits, vocab_size, temperature)
    metrics = token_metrics(inputs, decisions, algorithm.ratio_cap)
    sampled_columns: dict[str, Tensor | None] = {}
    for name, column in columns.items():
        sampled_columns[name] = None if column is None else column[inputs.loss_mask]
    return response_of(index, mini_batch, trajectory, algorithm, sampled_columns, metrics, texts)


def require_independent_responses(algorithm: Algorithm) -> None:
    """Raise ValueError if the algorithm's decision about a token depends on other responses too."""
    if algorithm.step_bound is not None:
        raise ValueError(
            f"{algorithm.name} decides from all tokens of an optimiser step, under the weights before the step: only a "
            "saved run that trained with it shows which tokens it blocks"
        )


def _with_recomputed(trajectory: Trajectory, log_recomputed: Tensor | None) -> Trajectory:
    """Return ``trajectory`` with pi' of its tokens, taken from ``log_recomputed`` [N, V]; unchanged if that is None."""
    if log_recomputed is None:
        return trajectory
    token_ids = as_int64(trajectory.response_ids)[:, None]
    log_probs = log_recomputed.gather(1, token_ids)[:, 0]
    return trajectory.with_columns(recomputed_log_probs=log_probs.numpy())


def _with_topk(
    trajectory: Trajectory, algorithm: Algorithm, vocab_size: int, log_recomputed: Tensor | None
) -> Trajectory:
    """Return ``trajectory`` with a TopK(mu) of sufficient K: the engine's, or else one from ``log_recomputed`` [N, V].

    Raises ValueError if the algorithm needs a TopK(mu) that neither source has.
    """
    saved_k = _k_of(trajectory)
    reads_recomputed = algorithm.needs_recomputed_distribution
    needs_all_ids = reads_recomputed or algorithm.needs_full_distribution
    # An algorithm that reads no TopK(mu) has topk 0. For it, any TopK(mu) is sufficient.
    needed_k = min(max(1, algorithm.topk), vocab_size)
    if needs_all_ids:
        needed_k = vocab_size
    if saved_k >= needed_k and not reads_recomputed:
        if algorithm.reads_topk:
            return likeliest_of(trajectory, needed_k)
        return trajectory
    # ``needs_full_distribution`` asks for the engine's own mu: ``log_recomputed`` cannot replace it.
    if log_recomputed is not None and not algorithm.needs_full_distribution:
        k = vocab_size
        if not reads_recomputed:
            k = algorithm.topk or DEFAULT_TOPK
        top = log_recomputed.topk(min(k, vocab_size))
        ids = top.indices.to(torch.int32).numpy()
        # The log-softmax of a near-certain token can round to a value above 0.
        log_probs = top.values.clamp(max=0).numpy()
        return trajectory.with_columns(topk_ids=ids, topk_log_probs=log_probs)
    if reads_recomputed:
        raise ValueError(
            f"{algorithm.name} measures the policy recomputed at the rollout's weights: give these "
            "weights with --rollout-policy"
        )
    if algorithm.reads_topk:
        remedy = "record it with rollout.topk_log_probs"
        if not needs_all_ids:
            remedy += ", or give the rollout's weights with --rollout-policy"
        raise ValueError(
            f"{algorithm.name} needs TopK(mu) with K >= {needed_k}, the batch has K = {saved_k}: {remedy}"
        )
    return trajectory


def likeliest_of(trajectory: Trajectory, k: int) -> Trajectory:
    """Return ``trajectory`` with the ``k`` likeliest ids of its TopK(mu) and their log-probabilities."""
    log_mu = trajectory.column("topk_log_probs")
    # Sort by descending log mu; an id of -1 stands for no id, and comes last.
    is_missing = trajectory.column("topk_ids") < 0
    order = np.where(is_missing, np.inf, -log_mu).argsort(1, kind="stable")
    likeliest_columns: dict[str, np.ndarray] = {}
    for name in ("topk_ids", "topk_log_probs", "loss_topk_log_probs"):
        if name in trajectory.columns:
            values = trajectory.columns[name]
            likeliest_columns[name] = np.take_along_axis(values, order[:, :k], 1)
    return trajectory.with_columns(**likeliest_columns)


def _k_of(trajectory: Trajectory) -> int:
    """Return K of the trajectory's TopK(mu); 0 without one."""
    ids = trajectory.columns.get("topk_ids")
    return 0 if ids is None else ids.shape[1]


def _exact(
    columns: dict[str, Tensor | None],
    trajectory: Trajectory,
    logits: Tensor,
    rollout_logits: Tensor | None,
    vocab_size: int,
    temperature: float,
) -> dict[str, Tensor | None]:
    """Return the divergences over the whole vocabulary, by their names in ``Token``.

    If K = V, they are the Top-K divergences in ``columns``. Otherwise they are computed from the logits of both models.
    Without ``rollout_logits`` they are None.
    """
    if _k_of(trajectory) == vocab_size:
        return {"exact_tv": columns["topk_tv"], "exact_kl": columns["topk_kl"]}
    if rollout_logits is None:
        return {"exact_tv": None, "exact_kl": None}
    # Compute 16 rows at a time: float64 copies of all rows would take twice the memory of the float32 logits.
    blocks = list(zip(logits.split(16), rollout_logits.split(16), strict=True))
    values_by_name: dict[str, Tensor | None] = {}
    for name, measure in (("exact_tv", divergence.exact_tv), ("exact_kl", divergence.exact_kl)):
        values: list[Tensor] = []
        for block, rollout_block in blocks:
            scaled_logits = block.double() / temperature
            values.append(measure(scaled_logits, rollout_block.double() / temperature))
        values_by_name[name] = torch.cat(values)
    return values_by_name
