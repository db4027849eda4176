"""SGLang 0.5.23's scores of given tokens: the request, and the answer, checked and converted to columns of a teacher.

All functions are pure: no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from megatron_dppo.data.columns import check_log_probs, check_topk
from megatron_dppo.engine.errors import EngineAnswerError
from megatron_dppo.engine.protocol import read_topk, topk_fields

_ROUNDING = 0.05
"""Largest difference in nats between two log-probabilities of one token in one answer."""


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens to score: ``token_ids`` from position ``start`` on, given all tokens before each.

    Attributes:
        token_ids: a prompt, and the tokens that follow it.
        start: number of the prompt's tokens, at least 1.
        top_k: K of the TopK log-probabilities at each scored token; 0 for none.
        vocabulary: ids of the TopK from this number on belong to no token of the policy.
    """

    token_ids: Sequence[int]
    start: int
    top_k: int
    vocabulary: int

    def body(self) -> bytes:
        """Return the JSON body of the call to ``/generate``. It generates no token."""
        body: dict[str, Any] = {
            "input_ids": list(self.token_ids),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            # SGLang scores no token at the start itself, so the start is the prompt's last token.
            "logprob_start_len": self.start - 1,
        }
        if self.top_k:
            body |= topk_fields(self.top_k, "return_flat_raw_top_logprobs")
        return orjson.dumps(body)

    def read(self, payload: bytes, origin: str) -> dict[str, np.ndarray]:
        """Return the columns of a teacher in the answer of the server ``origin``, at temperature 1, nats.

        ``teacher_log_probs`` float32 [R] for the R scored tokens and, with ``top_k``, ``teacher_topk_ids`` int32 and
        ``teacher_topk_log_probs`` float32 [R, K], with the id -1 and the log-probability 0 in place of ids outside
        ``vocabulary``. Raises EngineAnswerError if the answer is not about these tokens, or has an invalid number.
        """
        try:
            meta = orjson.loads(payload)["meta_info"]
            return self._columns(meta)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineAnswerError(f"{origin}/generate: scores of tokens: {error!r}") from error

    def _columns(self, meta: dict[str, Any]) -> dict[str, np.ndarray]:
        rows = len(self.token_ids) - self.start
        entries = meta["input_token_logprobs"]
        if len(entries) != rows + 1:
            raise ValueError(f"{len(entries)} log-probabilities, expected {rows + 1}")
        if meta["prompt_tokens"] != len(self.token_ids):
            raise ValueError(
                f"{meta['prompt_tokens']} prompt tokens, expected {len(self.token_ids)}"
            )
        log_probs = np.array([entry[0] for entry in entries[1:]], np.float32)
        check_log_probs(log_probs, "log-probabilities")
        columns = {"teacher_log_probs": log_probs}
        if self.top_k:
            columns |= self._topk(meta, log_probs)
        return columns

    def _topk(self, meta: dict[str, Any], of_tokens: np.ndarray) -> dict[str, np.ndarray]:
        # The row of the prompt's last token is a null, and is counted, but not sent.
        ids, log_probs = read_topk(meta, "input", (len(of_tokens), self.top_k), nulls=1)
        is_foreign = ids >= self.vocabulary
        ids = np.where(is_foreign, np.int32(-1), ids)
        log_probs = np.where(is_foreign, np.float32(0.0), log_probs)
        check_topk(ids, log_probs, "the answer")
        self._check_agreement(of_tokens, ids, log_probs)
        return {"teacher_topk_ids": ids, "teacher_topk_log_probs": log_probs}

    def _check_agreement(
        self, of_tokens: np.ndarray, ids: np.ndarray, log_probs: np.ndarray
    ) -> None:
        """Raise ValueError if a token's log-probability is not the one that TopK has for it, or is larger than all of a
        TopK without the token: then the rows belong to other tokens.
        """
        tokens = np.asarray(self.token_ids[self.start :], np.int32)
        is_token = ids == tokens[:, None]
        limits = np.where(ids >= 0, log_probs, np.inf).min(axis=1)
        limits = np.where(is_token.any(axis=1), (log_probs * is_token).sum(axis=1), limits)
        excess = of_tokens - limits
        is_wrong = (excess > _ROUNDING) | (is_token.any(axis=1) & (excess < -_ROUNDING))
        if is_wrong.any():
            position = int(is_wrong.argmax())
            raise ValueError(
                f"token {position} has {of_tokens[position]:.4g}, but {limits[position]:.4g} by the Top-K of its row: "
                "the rows belong to other tokens"
            )
