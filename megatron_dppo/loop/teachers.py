"""Scores of a run's teachers: the teacher of a problem, the prompt that it sees, and the columns of each response."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from megatron_dppo.config.distillation import key_of, longest_prompt
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.problems import PromptForm, load_tokenizer, tokenise
from megatron_dppo.data.records import DataError
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.token_scores import ScoredTokens
from megatron_dppo.fleet.endpoint import RecordClient
from megatron_dppo.fleet.generation import Slots
from megatron_dppo.fleet.teachers import TeacherClient
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.scorer import PlaceOf
from megatron_dppo.metrics import records
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.files import write_atomically
from megatron_dppo.trainer.collectives import on_rank_0

log = logging.getLogger(__name__)

_FIELD = re.compile(r"\{(\w+)\}")
"""A name in braces in a prompt template."""
_CHECKED_PROMPTS = 4
_CHECKED_TOKENS = 512
_CHECKED_TOP_K = 64
"""At the start each server scores the first tokens of some prompts. Most of these tokens are in a TopK of 64 ids, so
that both log-probabilities of a token are compared."""


class TeacherPrompts:
    """The teacher of each training problem, and the prompt that the teacher sees.

    Raises DataError for a problem without a teacher of the run, for a template with an unknown name, for a teacher's
    prompt that is too long, and for a teacher whose tokenizer maps an id of the policy to another token.

    Attributes:
        examples: the first tokens of some prompts, which the servers score at the start.
        warnings: a sentence for each teacher that sees prompts in a form that it may not know.
    """

    def __init__(self, config: TrainConfig, data: RunData) -> None:
        self._names = list(config.distillation.teachers)
        self._key = config.distillation.teacher_key
        long_enough = (p.prompt_ids for p in data.train.problems if len(p.prompt_ids) > 1)
        self.examples = [
            prompt[:_CHECKED_TOKENS] for prompt in islice(long_enough, _CHECKED_PROMPTS)
        ]
        self._prompts: dict[int, tuple[int, ...]] = {}
        """Problem id -> its teacher's prompt, if it is another than the policy's."""
        self.warnings: list[str] = []
        policy_tokenizer = load_tokenizer(config.model.hf_checkpoint)
        policy_tokens = _tokens_of(policy_tokenizer)
        problems: dict[str, list[Problem]] = {name: [] for name in self._names}
        for problem in data.train.problems:
            name = self.teacher_of(problem)
            if name not in problems:
                raise DataError(
                    f"{data.place_of(problem.prompt_ids)}: metadata.{self._key} (distillation.teacher_key): got "
                    f"{problem.metadata.get(self._key)!r}, expected one of {', '.join(self._names)}"
                )
            problems[name].append(problem)
        for name, teacher in config.distillation.teachers.items():
            tokenizer = load_tokenizer(teacher.hf_checkpoint)
            _check_tokens(name, policy_tokens, tokenizer)
            if teacher.prompt_template is not None:
                self._add_prompts(config, name, tokenizer, problems[name], data)
                continue
            is_other = tokenizer.chat_template != policy_tokenizer.chat_template
            if is_other and config.data.apply_chat_template:
                difference = "no" if tokenizer.chat_template is None else "another"
                self.warnings.append(
                    f"teacher {name}: its tokenizer has {difference} chat template, unlike the policy's, and it sees "
                    f"the prompts in the policy's form; {key_of(name)}.prompt_template, such as '{{prompt}}', renders "
                    "them in the teacher's own form"
                )

    def teacher_of(self, problem: Problem) -> str:
        """Return the name of the problem's teacher; a single teacher has all problems without a name."""
        name = problem.metadata.get(self._key)
        if name is None and len(self._names) == 1:
            return self._names[0]
        return str(name)

    def seen(self, problem: Problem, response: Trajectory) -> Trajectory:
        """Return a response as the problem's teacher sees it: after the teacher's prompt, with the teacher's columns.

        The response itself if the teacher sees the policy's prompt.
        """
        prompt = self._prompts.get(problem.problem_id)
        if prompt is None:
            return response
        start = len(response.prompt_ids)
        columns = {n: a for n, a in response.columns.items() if n.startswith("teacher_")}
        return Trajectory(
            response.problem_id,
            response.sample_index,
            np.concatenate([np.array(prompt, np.int32), response.token_ids[start:]]),
            np.concatenate([np.zeros(len(prompt), bool), response.loss_mask[start:]]),
            columns,
        )

    def _add_prompts(
        self,
        config: TrainConfig,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        problems: list[Problem],
        data: RunData,
    ) -> None:
        teacher = config.distillation.teachers[name]
        assert teacher.prompt_template is not None
        settings = config.data
        form = PromptForm(settings.apply_chat_template, arguments=settings.chat_template_arguments)
        key = f"{key_of(name)}.prompt_template"
        place_of = data.place_of
        texts = [filled(teacher.prompt_template, problem, key, place_of) for problem in problems]
        locations = [f"{key} for problem {problem.problem_id}" for problem in problems]
        most = longest_prompt(config, teacher)
        prompts = tokenise(tokenizer, texts, form, locations)
        for problem, prompt in zip(problems, prompts, strict=True):
            if len(prompt) > most:
                raise DataError(
                    f"{place_of(problem.prompt_ids)}: {key}: got a prompt of {len(prompt)} tokens, expected at "
                    f"most {most} ({key_of(name)}.max_prompt_tokens)"
                )
            self._prompts[problem.problem_id] = prompt


def filled(template: str, problem: Problem, key: str, place_of: PlaceOf) -> str:
    """Return ``template`` with the problem's texts for ``{prompt}``, ``{answer}`` and each ``{NAME}`` of its metadata.

    Raises DataError, with the problem's place and ``key``, for another name in braces.
    """
    values = {**problem.metadata, "prompt": problem.prompt, "answer": problem.answer}

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in values:
            names = ", ".join(sorted(map(str, values)))
            raise DataError(
                f"{place_of(problem.prompt_ids)}: {key}: got {match[0]}, expected one of {names} in braces"
            )
        return str(values[match[1]])

    return _FIELD.sub(value_of, template)


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


@dataclass(frozen=True)
class _FirstScores:
    """Scores of a teacher at the run's first start with it.

    Attributes:
        folder: name of the teacher's folder.
        prompts: tokens that were scored.
        log_probs: T - 1 for each prompt of T tokens: log p_T of all its tokens but the first, nats.
    """

    folder: str
    prompts: list[tuple[int, ...]]
    log_probs: list[list[float]]


_KEPT_SCORES = TypeAdapter(dict[str, _FirstScores])
"""Converts the scores of each teacher, by its name, to JSON and back."""


def _read_scores(path: Path) -> dict[str, _FirstScores]:
    """Return the kept scores of each teacher; none if no start has kept any. Raises RecordsError."""
    if not path.is_file():
        return {}
    try:
        return _KEPT_SCORES.validate_json(path.read_bytes())
    except ValueError as error:
        raise records.RecordsError(
            f"{path}: damaged ({error!r}), expected the teachers' scores at the run's first start"
        ) from error


class Teachers:
    """Scores one rank's responses on the teachers' servers; ``close`` it.

    Args:
        config: configuration of the run.
        spec: facts that follow from the configuration.
        data: the training problems.
        record: client of the server registry.
        stop: returns whether the run is stopping.
        is_leader: whether this rank scores responses. Rank 0 does.
    """

    _prompts: TeacherPrompts
    """Only leaders have it."""

    def __init__(
        self,
        config: TrainConfig,
        spec: RunSpec,
        data: RunData,
        record: RecordClient,
        stop: Callable[[], bool],
        *,
        is_leader: bool,
    ) -> None:
        self._config = config.distillation
        self._scores_path = Path(config.run.directory) / records.TEACHERS_FILE
        self._vocabulary = spec.model.shape.vocab_size
        self._runner = AsyncRunner()
        self._clients: dict[str, TeacherClient] = {}
        self._in_flight = Slots(sys.maxsize)
        """Measures the time with responses in flight. The clients limit their calls."""
        self._tokens = 0
        if not is_leader:
            return
        self._prompts = TeacherPrompts(config, data)
        top_k = min(max(self._config.top_k, _CHECKED_TOP_K), self._vocabulary)
        sequences = [
            ScoredTokens(ids, 1, top_k, self._vocabulary) for ids in self._prompts.examples
        ]
        for teacher in spec.teachers:
            self._clients[teacher.name] = TeacherClient(config, teacher, record, sequences, stop)

    def connect(self, *, is_fresh: bool) -> None:
        """Wait for a server of each teacher, and check the servers, now and when others join later. Collective.

        The scores of some prompts are kept in the run's folder. ``is_fresh``: whether the run begins at step 0 now; a
        later start compares the scores with the kept ones, so that other weights under the same name are noticed.
        Raises EngineError, and RecordsError for a damaged file of scores.
        """
        scores = on_rank_0(partial(self._check, is_fresh=is_fresh))
        for name, client in self._clients.items():
            client.expect(scores[name], "at the run's start")

    def _check(self, *, is_fresh: bool) -> dict[str, list[list[float]]]:
        """Check the servers on rank 0, and keep their scores of the examples. Return the log-probabilities."""
        for warning in self._prompts.warnings:
            log.warning("%s", warning)
        prompts = self._prompts.examples
        kept = {} if is_fresh else _read_scores(self._scores_path)
        checked: dict[str, _FirstScores] = {}
        for name, client in self._clients.items():
            folder = Path(self._config.teachers[name].hf_checkpoint).name
            earlier = kept.get(name)
            if earlier is not None and (earlier.folder, earlier.prompts) != (folder, prompts):
                log.warning(
                    "teacher %s: %s takes the place of %s of the run's earlier starts, or the first prompts are "
                    "others; its weights are not compared with the earlier ones",
                    name,
                    folder,
                    earlier.folder,
                )
                earlier = None
            log_probs = None if earlier is None else earlier.log_probs
            checked[name] = _FirstScores(folder, prompts, self._runner.run(client.check(log_probs)))
        write_atomically(self._scores_path, _KEPT_SCORES.dump_json(checked).decode())
        return {name: scores.log_probs for name, scores in checked.items()}

    def submit(self, problem: Problem, response: Trajectory) -> Future[dict[str, np.ndarray]]:
        """Start to score a response to ``problem``; returns its columns at once, or EngineError without scores."""
        client = self._clients[self._prompts.teacher_of(problem)]
        return self._runner.submit(self._score(client, self._prompts.seen(problem, response)))

    async def _score(self, client: TeacherClient, response: Trajectory) -> dict[str, np.ndarray]:
        try:
            async with self._in_flight.taken(0):
                columns = await score_response(
                    client.score, response, self._config.top_k, self._vocabulary
                )
        except EngineError as error:
            raise EngineError(f"teacher {client.name}: {error}") from error
        self._tokens += response.length
        return columns

    @property
    def clocks(self) -> tuple[float, float]:
        """Return the tokens that the teachers have read for this rank, and the seconds with responses in flight."""
        return self._tokens, self._in_flight.busy_s

    def close(self) -> None:
        """End the calls in flight, and close the connections."""
        self._runner.cancel_all()
        for client in self._clients.values():
            self._runner.run(client.close())
        self._runner.close()


async def score_response(
    score: Callable[[ScoredTokens], Awaitable[dict[str, np.ndarray]]],
    response: Trajectory,
    top_k: int,
    vocabulary: int,
) -> dict[str, np.ndarray]:
    """Return the columns of a response's sampled tokens. ``score`` returns the columns of one sequence.

    Raises the errors of ``score``. The other arguments are as in ``ScoredTokens``.
    """

    async def columns_of(branch: Trajectory) -> dict[str, np.ndarray]:
        start = len(branch.prompt_ids)
        tokens = ScoredTokens(branch.token_ids.tolist(), start, top_k, vocabulary)
        columns = await score(tokens)
        return {name: rows[branch.loss_mask[start:]] for name, rows in columns.items()}

    parts = await asyncio.gather(*map(columns_of, response.branches))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
