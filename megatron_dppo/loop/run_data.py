"""Data of a run: training and held-out problems."""

from __future__ import annotations

import logging

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.problems import ProblemSet, load_problems, load_tokenizer

log = logging.getLogger(__name__)


class RunData:
    """Training and held-out problems, tokenised. Raises DataError naming file and line.

    Attributes:
        train: ProblemSet of ``data.train``.
        held_out: name -> problems, of ``data.evaluation``.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._tokenizer = tokenizer = load_tokenizer(config.model.hf_checkpoint)

        def load(path: str) -> ProblemSet:
            problems = load_problems(
                path,
                tokenizer,
                max_prompt_tokens=config.data.max_prompt_tokens,
                apply_chat_template=config.data.apply_chat_template,
            )
            if problems.dropped:
                log.warning("%s: %d prompts are too long and were left out", path, problems.dropped)
            return problems

        self.train = load(config.data.train)
        self.held_out = {name: load(path).problems for name, path in config.data.evaluation.items()}

    def text_of(self, token_id: int) -> str:
        """Text of a single token."""
        return str(self._tokenizer.decode([token_id]))
