"""Scores of a run's teachers: the teacher of a problem, the prompt that it sees, and the columns of each response."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.config.distillation import key_of, longest_prompt
from megatron_dppo.config.schema import TeacherConfig, TrainConfig
from megatron_dppo.data.problems import PromptForm, load_tokenizer, tokenise
from megatron_dppo.data.records import DataError
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.token_scores import ScoredTokens
from megatron_dppo.fleet.endpoint import RecordClient
from megatron_dppo.fleet.teachers import TeacherClient
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.trainer.collectives import all_gather_json

_FIELD = re.compile(r"\{(\w+)\}")
"""A name in braces in a prompt template."""
_CHECKED_PROMPTS = 4
_CHECKED_TOKENS = 512
_CHECKED_TOP_K = 64
"""At the start each server scores the first tokens of some prompts. Most of these tokens are in a TopK of 64 ids, so
that both log-probabilities of a token are compared."""


@dataclass(frozen=True)
class TeacherAnswer:
    """The columns of one response. ``unavailable``: the reason why its teacher has no scores; None if it has them."""

    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    unavailable: str | None = None


class TeacherPrompts:
    """The teacher of each training problem, and the prompt that the teacher sees.

    Raises DataError for a problem without a teacher of the run, for a template with an unknown name, for a teacher's
    prompt that is too long, and for a teacher whose tokenizer maps an id of the policy to another token.
    """

    def __init__(self, config: TrainConfig, data: RunData) -> None:
        self._names = list(config.distillation.teachers)
        self._key = config.distillation.teacher_key
        prompts = [p.prompt_ids[:_CHECKED_TOKENS] for p in data.train.problems]
        self.examples = [prompt for prompt in prompts if len(prompt) > 1][:_CHECKED_PROMPTS]
        self._prompts: dict[int, tuple[int, ...]] = {}
        """Problem id -> its teacher's prompt, if it is another than the policy's."""
        policy_tokens = _tokens_of(load_tokenizer(config.model.hf_checkpoint))
        problems: dict[str, list[Problem]] = {name: [] for name in self._names}
        for problem in data.train.problems:
            name = self.teacher_of(problem)
            if name not in problems:
                raise DataError(
                    f"{_place(data, problem)}: metadata.{self._key} (distillation.teacher_key): got "
                    f"{problem.metadata.get(self._key)!r}, expected one of {', '.join(self._names)}"
                )
            problems[name].append(problem)
        for name, teacher in config.distillation.teachers.items():
            tokenizer = load_tokenizer(teacher.hf_checkpoint)
            _check_tokens(name, policy_tokens, tokenizer)
            if teacher.prompt_template is not None:
                self._add_prompts(config, name, teacher, tokenizer, problems[name], data)

    def teacher_of(self, problem: Problem) -> str:
        """Return the name of the problem's teacher; a single teacher has all problems without a name."""
        name = problem.metadata.get(self._key)
        if name is None and len(self._names) == 1:
            return self._names[0]
        return str(name)

    def of(self, problem: Problem) -> tuple[int, ...] | None:
        """Return the tokens of the prompt that the problem's teacher sees; None: the policy's prompt."""
        return self._prompts.get(problem.problem_id)

    def _add_prompts(
        self,
        config: TrainConfig,
        name: str,
        teacher: TeacherConfig,
        tokenizer: PreTrainedTokenizerBase,
        problems: list[Problem],
        data: RunData,
    ) -> None:
        assert teacher.prompt_template is not None
        settings = config.data
        form = PromptForm(settings.apply_chat_template, arguments=settings.chat_template_arguments)
        key = f"{key_of(name)}.prompt_template"
        texts: list[str] = []
        for problem in problems:
            try:
                texts.append(filled(teacher.prompt_template, problem))
            except KeyError as error:
                raise DataError(f"{_place(data, problem)}: {key}: {error.args[0]}") from error
        most = longest_prompt(config, teacher)
        locations = [f"{key} for problem {problem.problem_id}" for problem in problems]
        prompts = tokenise(tokenizer, texts, form, locations)
        for problem, prompt in zip(problems, prompts, strict=True):
            if len(prompt) > most:
                raise DataError(
                    f"{_place(data, problem)}: {key}: got a prompt of {len(prompt)} tokens, expected at most {most} "
                    f"({key_of(name)}.max_prompt_tokens)"
                )
            self._prompts[problem.problem_id] = prompt


def filled(template: str, problem: Problem) -> str:
    """Return ``template`` with the problem's texts for ``{prompt}``, ``{answer}`` and each ``{NAME}`` of its metadata.

    Raises KeyError, with the fault, for another name in braces.
    """
    values = {**problem.metadata, "prompt": problem.prompt, "answer": problem.answer}

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in values:
            names = ", ".join(sorted(map(str, values)))
            raise KeyError(f"got {match[0]}, expected one of {names} in braces")
        return str(values[match[1]])

    return _FIELD.sub(value_of, template)


def _place(data: RunData, problem: Problem) -> str:
    return data.place_of(problem.prompt_ids) or f"problem {problem.problem_id}"


def _tokens_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the token of each id, added tokens included."""
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _check_tokens(
    name: str, policy_tokens: Mapping[int, str], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise DataError with the first id that the policy's and the teacher's tokenizers map to different tokens."""
    teacher_tokens = _tokens_of(tokenizer)
    for token_id in sorted(policy_tokens):
        token = policy_tokens[token_id]
        if teacher_tokens.get(token_id) != token:
            raise DataError(
                f"{key_of(name)}.hf_checkpoint: its tokenizer maps the id {token_id} to "
                f"{teacher_tokens.get(token_id)!r}, expected {token!r} as the policy's tokenizer"
            )


class Teachers:
    """Scores one rank's responses on the teachers' servers; ``close`` it.

    Args:
        config: configuration of the run.
        spec: facts that follow from the configuration.
        prompts: teacher and teacher's prompt of each problem.
        record: client of the server registry.
        stop: returns whether the run is stopping.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: RunSpec,
        prompts: TeacherPrompts,
        record: RecordClient,
        stop: Callable[[], bool],
    ) -> None:
        self._prompts = prompts
        self._top_k = config.distillation.top_k
        self._vocabulary = spec.model.shape.vocab_size
        self._runner = AsyncRunner()
        self._clients: dict[str, TeacherClient] = {}
        for teacher in spec.teachers:
            self._clients[teacher.name] = TeacherClient(
                teacher,
                record,
                config.engine,
                request_timeout_s=config.distillation.request_timeout_s,
                concurrency=config.rollout.max_concurrent_requests,
                stop=stop,
            )
        self._tokens = 0
        self._open = 0
        self._busy_s = 0.0
        self._busy_since = 0.0

    def check(self) -> None:
        """Wait for a server of each teacher, and check the servers. Raises EngineError."""
        top_k = min(max(self._top_k, _CHECKED_TOP_K), self._vocabulary)
        sequences = [
            ScoredTokens(prompt, 1, top_k, self._vocabulary) for prompt in self._prompts.examples
        ]
        for client in self._clients.values():
            self._runner.run(client.check(sequences))

    def submit(self, problem: Problem, response: Trajectory) -> Future[TeacherAnswer]:
        """Start to score a response to ``problem``; returns at once."""
        return self._runner.submit(self._score(problem, response))

    async def _score(self, problem: Problem, response: Trajectory) -> TeacherAnswer:
        client = self._clients[self._prompts.teacher_of(problem)]
        prompt = self._prompts.of(problem)
        if not self._open:
            self._busy_since = time.monotonic()
        self._open += 1
        try:
            branches = response.branches
            parts = await asyncio.gather(*(self._columns(client, b, prompt) for b in branches))
        except EngineError as error:
            return TeacherAnswer(unavailable=f"teacher {client.name}: {error}")
        finally:
            self._open -= 1
            if not self._open:
                self._busy_s += time.monotonic() - self._busy_since
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return TeacherAnswer(columns)

    async def _columns(
        self, client: TeacherClient, branch: Trajectory, prompt: tuple[int, ...] | None
    ) -> dict[str, np.ndarray]:
        """Return the columns of a sequence's sampled tokens. ``prompt``: the teacher's prompt, or None."""
        own_prompt = branch.prompt_ids
        following = branch.token_ids[len(own_prompt) :]
        if prompt is None:
            prompt = tuple(own_prompt.tolist())
        tokens = self._scored([*prompt, *following.tolist()], len(prompt))
        columns = await client.score(tokens)
        self._tokens += len(tokens.token_ids)
        is_sampled = branch.loss_mask[len(own_prompt) :]
        return {name: rows[is_sampled] for name, rows in columns.items()}

    def _scored(self, tokens: list[int], start: int) -> ScoredTokens:
        return ScoredTokens(tokens, start, self._top_k, self._vocabulary)

    def take_figures(self) -> dict[str, float]:
        """Return the seconds and the speed of all ranks' scores since the last call. Collective."""
        tokens = 0
        longest_s = 0.0
        for rank_tokens, rank_s in all_gather_json(self._runner.run(self._take_counts())):
            tokens += rank_tokens
            longest_s = max(longest_s, rank_s)
        if not tokens:
            return {}
        return {
            metric_names.TEACHER_SECONDS: longest_s,
            # Avoid a division by 0: two reads of the clock may be equal.
            metric_names.TEACHER_SPEED: tokens / max(longest_s, 1e-9),
        }

    async def _take_counts(self) -> tuple[int, float]:
        """Return this rank's tokens, and the seconds with scores in flight, since the last call."""
        now = time.monotonic()
        if self._open:
            self._busy_s += now - self._busy_since
            self._busy_since = now
        counts = self._tokens, self._busy_s
        self._tokens = 0
        self._busy_s = 0.0
        return counts

    def close(self) -> None:
        """End the calls in flight, and close the connections."""
        self._runner.cancel_all()
        for client in self._clients.values():
            self._runner.run(client.close())
        self._runner.close()


def require_columns(columns: Mapping[str, Any], top_k: int, place: str) -> None:
    """Raise DataError unless a saved response has the columns that ``distillation`` needs, with ``top_k`` ids."""
    needed = {"teacher_log_probs"}
    if top_k:
        needed |= {"teacher_topk_ids", "teacher_topk_log_probs"}
    if missing := sorted(needed - columns.keys()):
        raise DataError(
            f"{place} has no {', '.join(missing)}, expected a batch of a run with distillation.teachers"
        )
    if top_k and columns["teacher_topk_ids"].shape[1] != top_k:
        raise DataError(
            f"{place} has {columns['teacher_topk_ids'].shape[1]} of a teacher's ids for each token, expected "
            f"distillation.top_k = {top_k}"
        )
