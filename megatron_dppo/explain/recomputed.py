"""Explanation of a batch under given weights: pi, and pi' or TopK(mu) where the batch lacks them, by
transformers; everything else by the package's functions.

Legend: S = tokens of a trajectory, N = sampled ones; V = vocabulary; K = ids of TopK(mu).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from megatron_dppo.algorithms.policy_loss import Algorithm, decide, token_metrics
from megatron_dppo.data.packing import pack
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.explain.explanation import (
    Place,
    Response,
    TokenTexts,
    response_of,
    token_columns,
)
from megatron_dppo.trainer.token_loss import inputs_from
from megatron_dppo.vocab_parallel import policy_stats
from megatron_dppo.vocab_parallel.exact import exact_divergence

DEFAULT_TOPK = 20
"""K if neither the batch nor the algorithm sets it; the paper's value."""


class Policy:
    """The model in ``folder`` by transformers, in float32.

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
        """Logits, float32 [S, V]; row t predicts token t + 1.

        Raises ValueError for an id outside the model's vocabulary.
        """
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
        if int(ids.max()) >= self.vocab_size:
            raise ValueError(
                f"{self.folder}: the batch holds token id {int(ids.max())}, but this model's "
                f"vocabulary has {self.vocab_size}: it is another model's batch"
            )
        return self._model(ids).logits[0].float()


def explain_response(
    place: Place,
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
        place: of the response in the batch.
        trajectory: the response.
        algorithm: whose mask and weight are explained.
        logits: [S, V], of the policy that gives pi.
        rollout_logits: [S, V], of the weights that sampled the response; they give pi', the exact
            divergences, and TopK(mu) if the batch has none. The whole of mu, which
            ``dppo-exact-...`` need, must come from the engine.
        temperature: of the rollout.
        texts: token id -> text.

    Raises:
        ValueError: the algorithm needs data that is missing.
    """
    vocab_size = logits.shape[1]
    log_mu = None
    if rollout_logits is not None:
        if rollout_logits.shape != logits.shape:
            raise ValueError(
                f"the rollout policy's vocabulary has {rollout_logits.shape[1]} tokens, the "
                f"policy's {vocab_size}: they are different models"
            )
        predicting = torch.from_numpy(np.flatnonzero(trajectory.loss_mask) - 1)
        log_mu = (rollout_logits[predicting] / temperature).log_softmax(-1)
    known = _with_topk(_with_recomputed(trajectory, log_mu), algorithm, vocab_size, log_mu)
    batch = pack([known])
    topk_ids = batch.columns.get("topk_ids")
    stats = policy_stats(
        logits, batch.target_ids, vocab_size=vocab_size, temperature=temperature,
        topk_ids=None if topk_ids is None else topk_ids.long(), with_entropy=True,
    )  # fmt: skip
    inputs = inputs_from(stats, batch)
    if algorithm.needs_recomputed and inputs.recomputed_log_probs is None:
        raise ValueError(
            f"{algorithm.name} compares pi with log-probabilities recomputed at the rollout's "
            "weights: give these weights with --rollout-policy"
        )
    decisions = decide(algorithm, inputs)
    columns = token_columns(inputs, decisions)
    columns |= _exact(columns, known, logits, rollout_logits, vocab_size, temperature)
    metrics = token_metrics(inputs, decisions, algorithm.ratio_cap)
    sampled = {n: None if c is None else c[inputs.loss_mask] for n, c in columns.items()}
    return response_of(place, trajectory, algorithm, sampled, metrics, texts)


def _with_recomputed(trajectory: Trajectory, log_mu: Tensor | None) -> Trajectory:
    """``trajectory`` with pi' from the rollout policy's ``log_mu`` [N, V], if given."""
    if log_mu is None:
        return trajectory
    chosen = torch.from_numpy(trajectory.response_ids.astype(np.int64))[:, None]
    return trajectory.with_columns(recomputed_log_probs=log_mu.gather(1, chosen)[:, 0].numpy())


def _with_topk(
    trajectory: Trajectory, algorithm: Algorithm, vocab_size: int, log_mu: Tensor | None
) -> Trajectory:
    """``trajectory`` with a TopK(mu) of sufficient K: the engine's, else from ``log_mu`` [N, V]."""
    carried = _width(trajectory)
    recomputed = algorithm.needs_recomputed_distribution
    whole = recomputed or algorithm.needs_full_distribution
    wanted = vocab_size if whole else 1
    if carried >= wanted and not recomputed:
        return trajectory
    if log_mu is not None and not algorithm.needs_full_distribution:
        k = vocab_size if recomputed else algorithm.topk or DEFAULT_TOPK
        top = log_mu.topk(min(k, vocab_size))
        ids = top.indices.to(torch.int32).numpy()
        # A log-softmax of a near-certain token can end a rounding step above 0.
        log_probs = top.values.clamp(max=0).numpy()
        return trajectory.with_columns(topk_ids=ids, topk_log_probs=log_probs)
    if recomputed:
        raise ValueError(
            f"{algorithm.name} measures the policy recomputed at the rollout's weights: give these "
            "weights with --rollout-policy"
        )
    if algorithm.reads_topk:
        raise ValueError(
            f"{algorithm.name} needs TopK(mu) with K >= {wanted}, the batch has K = {carried}: "
            "record it with rollout.topk_log_probs"
            + ("" if whole else ", or give the rollout's weights with --rollout-policy")
        )
    return trajectory


def _width(trajectory: Trajectory) -> int:
    """K of its TopK(mu); 0 without one."""
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
    """Divergences over the whole vocabulary: those of Top-K if K = V, else recomputed."""
    if _width(trajectory) == vocab_size:
        return {"exact_tv": columns["topk_tv"], "exact_kl": columns["topk_kl"]}
    if rollout_logits is None:
        return {"exact_tv": None, "exact_kl": None}
    exact = exact_divergence(logits, rollout_logits, vocab_size=vocab_size, temperature=temperature)
    return {"exact_tv": exact.tv, "exact_kl": exact.kl}
