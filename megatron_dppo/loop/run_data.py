"""Data of a run: training and held-out problems."""

from __future__ import annotations

import logging

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.problems import ProblemSet, load_problems, load_tokenizer
from megatron_dppo.loop.answers import (
    bad_answers,
    extracted,
    refuse_bad_answers,
    without,
)
from megatron_dppo.rewards.checked_answers import BadAnswers, handed_over
from megatron_dppo.types import Problem

log = logging.getLogger(__name__)


class RunData:
    """Training and held-out problems, tokenised. Raises DataError naming file and line.

    Attributes:
        train: ProblemSet of ``data.train``.
        held_out: name -> problems, of ``data.evaluation``.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._tokenizer = load_tokenizer(config.model.hf_checkpoint)
        paths = [config.data.train, *config.data.evaluation.values()]
        self._sets = {path: self._load(path) for path in dict.fromkeys(paths)}

    @property
    def train(self) -> ProblemSet:
        """The training set."""
        return self._sets[self._config.data.train]

    @property
    def held_out(self) -> dict[str, tuple[Problem, ...]]:
        """The problems of each held-out set, by its name."""
        files = self._config.data.evaluation
        return {name: self._sets[path].problems for name, path in files.items()}

    @property
    def scored(self) -> dict[str, str]:
        """What ``bad_answers`` depends on: hashes of the files, the reward, and the tokenizer's folder."""
        files = {path: found.sha256 for path, found in self._sets.items()}
        model, limit = self._config.model.hf_checkpoint, self._config.data.max_prompt_tokens
        return files | {"reward": self._config.reward.name, "prompts": f"{limit} tokens, {model}"}

    def bad_answers(self) -> BadAnswers:
        """What is wrong with answers: as the check of this start found, where it left its word.

        A run that replays rollouts scores nothing, and has none.
        """
        if self._config.rollout.replay_from is not None:
            return {path: [] for path in self._sets}
        known = handed_over(self.scored)
        return bad_answers(self._sets, self._config.reward) if known is None else known

    def settle(self, bad: BadAnswers) -> None:
        """Refuse bad answers or leave their problems out, as configured. Raises DataError."""
        if self._config.data.on_bad_answer == "refuse":
            refuse_bad_answers(bad)
        self._sets = {path: without(found, path, bad) for path, found in self._sets.items()}
        for path, found in self._sets.items():
            if found.bad_answers:
                row, why = bad[path][0]
                log.warning(
                    "%s: %d problems were left out because their answers can't be used, the first "
                    "in line %d: %s",
                    path,
                    found.bad_answers,
                    row + 1,
                    why,
                )

    def _load(self, path: str) -> ProblemSet:
        found = load_problems(
            path,
            self._tokenizer,
            max_prompt_tokens=self._config.data.max_prompt_tokens,
            apply_chat_template=self._config.data.apply_chat_template,
        )
        if found.dropped:
            log.warning("%s: %d prompts are too long and were left out", path, found.dropped)
        return extracted(found, self._config.reward.name)

    def text_of(self, token_id: int) -> str:
        """Text of a single token."""
        return str(self._tokenizer.decode([token_id]))
