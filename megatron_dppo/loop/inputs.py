"""Load the training and held-out problems of a run, and hash every file that it reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_dppo.config.data_files import label_of
from megatron_dppo.config.data_schema import ProblemFile
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data import sampling
from megatron_dppo.data.problems import (
    DataKeys,
    ProblemSet,
    PromptForm,
    load_policy_tokenizer,
    load_problems,
)
from megatron_dppo.data.records import DataError
from megatron_dppo.data.seal import Origin, text_digest
from megatron_dppo.data.thoughts import DEFAULT_MARKS
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.engine.tool_calls import tool_format_of
from megatron_dppo.engine.turn_text import ResponseReader
from megatron_dppo.environments import (
    PolicyFormat,
    environments_of,
    makes_prompts,
    problem_fault,
    reads_tool_calls,
)
from megatron_dppo.environments.turn_template import TurnTemplate
from megatron_dppo.loop.unread_options import option_warnings
from megatron_dppo.rewards.answer_check import bad_answers, refuse_bad_answers, without
from megatron_dppo.rewards.checked_answers import BadAnswers, handed_over
from megatron_dppo.rewards.trial import reward_faults

log = logging.getLogger(__name__)


class RunData:
    """Training and held-out problems, tokenised. Raises DataError naming file and line.

    Attributes:
        form: how a problem becomes a prompt.
        train: the training set: the problems of all training files, in their order.
        files: maps a training problem to its file.
        turns: the tokens between the turns of an episode; None without an environment.
        reader: reads the text of responses.
        policy_format: the form in which the policy writes its turns.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        data = config.data
        arguments = data.chat_template_arguments
        self.form = PromptForm(
            data.apply_chat_template, data.system_prompt, data.prompt_template, arguments
        )
        rollout = config.rollout
        self._tokenizer, ends, self._embedding_rows = load_policy_tokenizer(
            config.model.hf_checkpoint, self.form, rollout.stop_token_ids, rollout.stop
        )
        for warning in option_warnings(config):
            log.warning("%s", warning)
        self.reader = ResponseReader.of(
            self._tokenizer,
            self.text_of,
            is_chat=data.apply_chat_template,
            arguments=arguments,
            marks=DEFAULT_MARKS if data.thought_marks is None else data.thought_marks,
        )
        environment = config.environment
        self.turns: TurnTemplate | None = None
        if environment.name is not None:
            is_chat = data.apply_chat_template
            self.turns = TurnTemplate(
                self._tokenizer,
                environment.role,
                is_chat=is_chat,
                arguments=arguments,
                end_tokens=ends.tokens,
            )
        self.policy_format = self._policy_format()
        self._sets: dict[str, ProblemSet] = {}
        """The problems of each file. The key is ``_name(file)``."""
        faults: list[str] = []
        for file in [*data.train_files, *data.evaluation_files.values()]:
            name = _name(file)
            if name in self._sets:
                continue
            try:
                self._sets[name] = self._load(file)
            except DataError as error:
                faults.append(str(error))
        if faults:
            raise DataError("; ".join(faults))
        self.train = sampling.joined(self.train_parts)
        self.files = sampling.TrainingFiles(
            [label_of(file.path) for file in data.train_files],
            [part.records for part in self.train_parts],
        )

    @property
    def train_parts(self) -> list[ProblemSet]:
        """The problems of each training file."""
        return [self._sets[_name(file)] for file in self._config.data.train_files]

    @property
    def held_out(self) -> dict[str, tuple[Problem, ...]]:
        """The problems of each held-out set, by its name."""
        files = self._config.data.evaluation_files
        return {name: self._sets[_name(file)].problems for name, file in files.items()}

    def place_of(self, prompt_ids: Sequence[int]) -> str | None:
        """Return file and line of the problem whose prompt is a prefix of ``prompt_ids``; None without such a problem.

        The tokens may continue with turns or a response. If several prompts are prefixes, the longest prompt counts.
        """
        longest_length = -1
        place: str | None = None
        for name, problem_set in self._sets.items():
            for problem in problem_set.problems:
                length = len(problem.prompt_ids)
                if length > longest_length and tuple(prompt_ids[:length]) == problem.prompt_ids:
                    longest_length = length
                    place = problem_set.location(name, problem.problem_id)
        return place

    def origin(self) -> Origin:
        """Return the settings and problems that every batch of the run is generated from."""
        rollout = self._config.rollout
        # Each response's stamp has the parameters of its request, and is compared with these parameters. The requests
        # use ``SamplingParams``. Don't use this class here, so that the comparison also finds its errors.
        sampling_parameters = {
            "max_new_tokens": rollout.max_response_tokens,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "min_p": 0.0,
            "ignore_eos": False,
            "stop_token_ids": list(rollout.stop_token_ids) or None,
            "stop": list(rollout.stop) or None,
        }
        # ``repr(self.form)`` does not contain the arguments. Add them only if there are any: the hashes that runs
        # without arguments have saved stay valid.
        template_parts = [repr(self._tokenizer.chat_template), repr(self.form)]
        if self.form.arguments:
            template_parts.append(repr(self.form.arguments))
        template = text_digest(*template_parts)
        problems = {problem.problem_id: problem for problem in self.train.problems}
        environment = self._config.environment
        generation_tokens = None
        if self.turns is not None:
            generation_tokens = self.turns.generation_tokens
        return Origin(
            sampling_parameters,
            template,
            rollout.group_size,
            problems,
            credit=environment.credit,
            generation_tokens=generation_tokens,
            makes_prompts=makes_prompts(environment.name, environment.options),
            advantage=self._config.algorithm.advantage,
        )

    @property
    def evaluation_hashes(self) -> dict[str, str]:
        """SHA-256 of each held-out file's bytes, by ``data.evaluation/`` and the file's path."""
        files = self._config.data.evaluation_files.values()
        return {f"data.evaluation/{file.path}": self._sets[_name(file)].sha256 for file in files}

    def sampler(self) -> sampling.ReturningSampler:
        """Return the sampler of positions in ``train``: from all files together, or from each file by its weight."""
        data = self._config.data
        seed = self._config.run.seed
        # Either all files have a weight, or no file has a weight.
        weights = [file.weight for file in data.train_files if file.weight is not None]
        if not weights:
            return sampling.ReturningSampler(
                sampling.ProblemSampler(len(self.train), seed, data.shuffle)
            )
        counts = [len(s) for s in self.train_parts]
        return sampling.ReturningSampler(
            sampling.WeightedSampler(counts, weights, seed, data.shuffle)
        )

    @property
    def answer_check_inputs(self) -> dict[str, str]:
        """The inputs of ``bad_answers``: hashes of the files, the reward, the prompt limit and the model's folder."""
        files = {name: problem_set.sha256 for name, problem_set in self._sets.items()}
        model = self._config.model.hf_checkpoint
        limit = self._config.data.max_prompt_tokens
        reward = self._config.reward.model_dump_json()
        return files | {"reward": reward, "prompts": f"{limit} tokens, {model}"}

    def bad_answers(self) -> BadAnswers:
        """Return the faults of the problems' answers.

        If the checks before the start have scored the answers, their result is used. Otherwise the answers are scored.
        Exception: if a run replays rollouts and ``data.on_bad_answer`` is ``refuse``, nothing is scored, and only
        missing answers are faults. With ``drop``, a replay scores the answers too, because it must drop the same
        problems as the replayed run.
        """
        drops = self._config.data.on_bad_answer == "drop"
        if self._config.rollout.replays and not drops:
            return bad_answers(self._sets, self._config.reward, scores=False)
        known_faults = handed_over(self.answer_check_inputs)
        if known_faults is None:
            return bad_answers(self._sets, self._config.reward)
        return known_faults

    def reward_faults(self) -> list[str]:
        """Return the faults of the rewards on problems of the training files (``rewards/trial.py``).

        With ``reward.column``, each reward is tried on problems that it scores. Empty for a run that replays rollouts,
        because it scores nothing.
        """
        if self._config.rollout.replays:
            return []
        max_tokens = self._config.rollout.max_response_tokens
        files = self._config.data.train_files
        faults: dict[str, None] = {}
        # All rewards score the problems of the first file, unless a column names a problem's reward.
        for file in files if self._config.reward.column is not None else files[:1]:
            problem_set = self._sets[_name(file)]
            thought = self.reader.open_thought(problem_set.problems[0].prompt_ids)
            faults |= dict.fromkeys(
                reward_faults(file.path, problem_set, self._config.reward, max_tokens, thought)
            )
        return list(faults)

    def refuse_or_drop(self, bad: BadAnswers) -> None:
        """Raise DataError for bad answers, or leave their problems out (``data.on_bad_answer``).

        Also raises DataError if the training set has fewer problems than a step draws.
        """
        if self._config.data.on_bad_answer == "refuse":
            refuse_bad_answers(bad, self._sets)
        for name, problem_set in self._sets.items():
            self._sets[name] = without(problem_set, name, bad)
        self.train = sampling.joined(self.train_parts)
        for name, problem_set in self._sets.items():
            if problem_set.bad_answers:
                row, fault = bad[name][0]
                log.warning(
                    "%s: %d problems were left out because their answers can't be used, the first in %s: %s",
                    name,
                    problem_set.bad_answers,
                    problem_set.line_of(row),
                    fault,
                )
        self._check_set_size()

    def _check_set_size(self) -> None:
        """Raise DataError if a step would train on a problem twice. A run that replays draws no problems."""
        prompts_per_step = self._config.rollout.prompts_per_step
        if len(self.train) >= prompts_per_step or self._config.rollout.replays:
            return
        raise DataError(
            f"{len(self.train)} of {self.train.records} training problems are left "
            f"({self.train.dropped} prompts are longer than data.max_prompt_tokens = "
            f"{self._config.data.max_prompt_tokens}, {self.train.bad_answers} answers can't be used), expected at "
            f"least rollout.prompts_per_step = {prompts_per_step}: a step would train on a problem twice"
        )

    def _policy_format(self) -> PolicyFormat:
        """Return the form of the policy's turns. Raises ToolFormatError if the configured format reads no calls."""
        environment = self._config.environment
        data = self._config.data
        tool_format = None
        if data.apply_chat_template and reads_tool_calls(environment.name, environment.options):
            try:
                tool_format = tool_format_of(
                    self._tokenizer,
                    environment.options.get("tool_format"),
                    data.chat_template_arguments,
                )
                self._check_members_formats()
            except ImportError as error:
                raise DataError(
                    f"environment.name: {environment.name} reads tool calls by SGLang's parsers, which can't be "
                    f"imported: {error}"
                ) from error
        added_tokens = self._tokenizer.added_tokens_decoder.values()
        return PolicyFormat(
            tool_format,
            [str(token) for token in added_tokens],
            list(self.reader.special_tokens.values()),
            self.reader.marks,
        )

    def _check_members_formats(self) -> None:
        """Raise ToolFormatError if an environment that the run's environment starts has a format without calls."""
        config = self._config
        _, *members = environments_of(config.environment.name, config.environment.options)
        for member in members:
            member_format = member.options.get("tool_format")
            if member_format is not None and reads_tool_calls(member.name, member.options):
                tool_format_of(
                    self._tokenizer, member_format, config.data.chat_template_arguments, member.key
                )

    def _load(self, file: ProblemFile) -> ProblemSet:
        """Load the problems of ``file``. Log a warning if prompts are left out."""
        problem_set = load_problems(
            file.path,
            self._tokenizer,
            max_prompt_tokens=self._config.data.max_prompt_tokens,
            form=self.form,
            keys_of=DataKeys.of(file),
            embedding_rows=self._embedding_rows,
        )
        self._refuse_other_metadata(file, problem_set)
        if problem_set.dropped:
            log.warning(
                "%s: %d of %d prompts are longer than data.max_prompt_tokens = %d and were left out; %d "
                "problems are left",
                file.path,
                problem_set.dropped,
                problem_set.records,
                self._config.data.max_prompt_tokens,
                len(problem_set),
            )
        return problem_set

    def _refuse_other_metadata(self, file: ProblemFile, problem_set: ProblemSet) -> None:
        """Raise DataError for a problem whose metadata names no reward, or no environment, of this run."""
        environment = self._config.environment
        for problem in problem_set.problems:
            fault = problem_fault(environment.name, environment.options, problem.metadata)
            try:
                self._config.reward.names_for(problem.metadata)
            except ValueError as error:
                fault = fault or str(error)
            if fault is not None:
                raise DataError(f"{problem_set.location(file.path, problem.problem_id)}: {fault}")

    def text_of(self, token_ids: Sequence[int] | np.ndarray, *, special: bool = True) -> str:
        """Return the text of tokens. ``special``: whether to include special tokens, e.g. the end of a turn."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not special))


def _name(file: ProblemFile) -> str:
    """Return the file's path, followed by the configured keys. With other keys, a file has other problems."""
    keys: list[str] = []
    for key in (file.prompt_key, file.answer_key, file.metadata_key):
        if key is not None:
            keys.append(key)
    if file.metadata:
        keys.append(json.dumps(file.metadata, sort_keys=True, default=str))
    if keys:
        return f"{file.path} ({', '.join(keys)})"
    return file.path


WEIGHTS_SUFFIX = ".safetensors"
_READ_SUFFIXES = (WEIGHTS_SUFFIX, ".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Suffixes of the files that programs read in a Hugging Face folder. A README and other weight formats don't count."""


def model_files(checkpoint: str, adapters: str | None) -> dict[str, Path]:
    """Return the files of the start model and of the adapters to start from, by configuration key and file name.

    A run stores their SHA-256 when it begins, and each resumed start compares them.
    """
    folders = {"model.hf_checkpoint": checkpoint}
    if adapters is not None:
        folders["lora.start_from"] = adapters
    files: dict[str, Path] = {}
    for key, folder in folders.items():
        for path in sorted(Path(folder).iterdir()):
            is_hidden = path.name.startswith(".")
            if path.suffix in _READ_SUFFIXES and not is_hidden and path.is_file():
                files[f"{key}/{path.name}"] = path
    return files
