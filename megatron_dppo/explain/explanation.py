"""What is told of each response token, and how it is read off a mask's inputs and decisions.

Legend: N = sampled tokens of a response; K = ids of TopK(mu).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_dppo.algorithms import divergence, rules
from megatron_dppo.algorithms.inputs import TokenInputs, rollout
from megatron_dppo.algorithms.policy_loss import PPO_CLIP, Algorithm, Decisions
from megatron_dppo.algorithms.rules import importance_ratio
from megatron_dppo.algorithms.table import NEGATIVE
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.metrics.sums import MetricSums


@dataclass(frozen=True)
class Token:
    """One response token. ``mu``, ``pi`` and ``recomputed`` are probabilities; divergences are of pi
    from mu; KL and entropy in nats; None: not known.
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
    """min(w, C): factor of the gradient of log pi, beside A, if the token trains."""
    binary_tv: float
    binary_kl: float
    topk_tv: float | None
    topk_kl: float | None
    exact_tv: float | None
    exact_kl: float | None
    recomputed: float | None
    """pi': probability under the rollout's weights by transformers; pi' - mu is the trainer-engine
    mismatch.
    """
    entropy: float
    threshold: str
    """The bounds for a token with this sign of A, as text."""
    trains: bool
    ppo_trains: bool
    """Whether it would train under PPO's Clip-Higher."""


@dataclass(frozen=True)
class Place:
    """Where a response stands: position in the batch, and number of its mini-batch, from 1."""

    index: int
    mini_batch: int


@dataclass(frozen=True)
class Response:
    """A response with its explained tokens and the sums of the package's metrics over them."""

    index: int
    trajectory: Trajectory
    prompt: str
    tokens: tuple[Token, ...]
    metrics: MetricSums


def response_of(
    place: Place,
    trajectory: Trajectory,
    algorithm: Algorithm,
    columns: Mapping[str, Tensor | None],
    metrics: MetricSums,
    texts: TokenTexts,
) -> Response:
    """A response with its tokens. ``columns``: fields of ``Token`` [N]; None: not known."""
    values: dict[str, list[Any]] = {
        name: [None] * trajectory.sampled if c is None else c.tolist()
        for name, c in columns.items()
    }
    threshold = threshold_text(algorithm, trajectory.advantage > 0)
    tokens = tuple(
        Token(
            response=place.index, position=i, mini_batch=place.mini_batch, token_id=token_id,
            text=texts[token_id], advantage=trajectory.advantage, threshold=threshold,
            **{name: column[i] for name, column in values.items()},
        )
        for i, token_id in enumerate(trajectory.response_ids.tolist())
    )  # fmt: skip
    prompt = texts.joined(trajectory.prompt_ids.tolist())
    return Response(place.index, trajectory, prompt, tokens, metrics)


def token_columns(inputs: TokenInputs, decisions: Decisions) -> dict[str, Tensor | None]:
    """Fields of ``Token`` for every row of ``inputs``."""
    pi, mu, recomputed = inputs.log_probs, inputs.rollout_log_probs, inputs.recomputed_log_probs
    topk_tv = topk_kl = None
    log_pi, log_mu, valid = inputs.topk_log_probs, inputs.rollout_topk_log_probs, inputs.topk_valid
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


BOUNDS: dict[str, Callable[[float, bool], str | None]] = {
    "tv_threshold": lambda bound, positive: f"TV > {bound:g}",
    "kl_threshold": lambda bound, positive: f"KL > {bound:g}",
    "clip_low": lambda bound, positive: None if positive else f"r < {1 - bound:g}",
    "clip_high": lambda bound, positive: f"r > {1 + bound:g}" if positive else None,
    "max_drop": lambda bound, positive: None if positive else f"drop >= {bound:g}",
    "rare_below": lambda bound, positive: f"relaxed where mu < {bound:g}",
    "mismatch_low": lambda bound, positive: f"pi'/mu < {bound:g}",
    "mismatch_high": lambda bound, positive: f"pi'/mu > {bound:g}",
}
"""Name of a preset's number -> (value, A > 0) -> the bound as text; None: no bound for this sign."""


def threshold_text(algorithm: Algorithm, positive: bool) -> str:
    """The algorithm's bounds for this sign of A, as text; empty if it blocks nothing."""
    numbers = dict(algorithm.numbers)
    for name, negative in NEGATIVE.items():
        own = numbers.pop(negative, None)
        if own is not None and not positive:
            numbers[name] = own
    bounds = [
        text
        for name, value in numbers.items()
        if name in BOUNDS and (text := BOUNDS[name](value, positive)) is not None
    ]
    anchor = " (against pi')" if algorithm.needs_recomputed and bounds else ""
    return ", ".join(bounds) + anchor


class TokenTexts:
    """Token id -> text. A token that is part of a character is shown by its name in the vocabulary,
    an id that the tokenizer does not know by its number.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._text(token_id)
        return self._known[token_id]

    def joined(self, token_ids: list[int]) -> str:
        """The text of a whole sequence, special tokens included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _text(self, token_id: int) -> str:
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        if text and "\ufffd" not in text:
            return text
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        return f"<id {token_id}>" if name is None else str(name)
