"""Configuration sections about data: problems, environments and rewards. ``schema.py`` has the other sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag


class Section(BaseModel):
    """Base of every section: frozen, without unknown keys and without silent conversion of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ProblemFile(Section):
    """Files of problems, with a prompt and an answer in each row."""

    path: str
    """JSONL, JSON, CSV, TSV or Parquet file (text also compressed), a folder of these, or a glob (docs/data.md)."""
    prompt_key: str | None = None
    """Column of the prompt, text or chat messages; ``a.b`` is a field of a structure. Empty: a column with one of the
    usual names in docs/data.md#records.
    """
    answer_key: str | None = None
    """Column of the answer; ``conversations[-1].value`` is the last message of a conversation. Empty: a column with
    one of the usual names in docs/data.md#records.
    """
    metadata_key: str | None = None
    """Column of an object with other values that a reward may use; ``*``: all columns of the row. Empty:
    ``metadata``, ``extra_info`` or ``info``, if the row has such a column.
    """
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Values that are added to the metadata of every problem of the file, such as ``{reward: code}`` for
    ``reward.column``. They replace values of the same names in the rows.
    """


def _list_or_text(value: object) -> str:
    if isinstance(value, list):
        return "list"
    return "text"


def _table_or_text(value: object) -> str:
    if isinstance(value, dict | ProblemFile):
        return "table"
    return "text"


class TrainingFile(ProblemFile):
    """One of several files of training problems."""

    weight: float | None = Field(default=None, gt=0)
    """Share of the prompts that come from this file, relative to the weights of the other files. Empty for all files:
    all problems are equally frequent.
    """


TrainingFiles = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TrainingFile], Tag("list")],
    Discriminator(_list_or_text),
]
EvaluationFile = Annotated[
    Annotated[str, Tag("text")] | Annotated[ProblemFile, Tag("table")],
    Discriminator(_table_or_text),
]


MarkPair = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2, max_length=2)]


class DataConfig(Section):
    """Problems to train on and to evaluate with, and how they become prompts; docs/data.md."""

    train: TrainingFiles
    """JSONL, CSV or Parquet file of training problems, a folder or a glob of such files, or a list of any of these."""
    evaluation: dict[str, EvaluationFile] = Field(default_factory=dict)
    """Name -> file, folder or glob of held-out problems; null removes a set of the configuration's ``base``."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longest prompt in tokens. Longer prompts are dropped at load, and counted. The run does not start if fewer
    problems remain than ``rollout.prompts_per_step``.
    """
    apply_chat_template: bool = True
    """Wrap a plain-text prompt as one user message in the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message before each prompt, in training and evaluation."""
    prompt_template: str | None = None
    """Text around each problem, in training and evaluation; ``{prompt}`` stands for the problem. Empty: no text around
    it.
    """
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as ``{enable_thinking: false}``, for every prompt in training and
    evaluation, and for the turns of environments and agents.
    """
    thought_marks: list[MarkPair] | None = None
    """Pairs of texts that begin and end the policy's thoughts, such as ``[["[THINK]", "[/THINK]"]]``. Text in a thought
    is no answer. Empty: the pairs in docs/rewards.md#thoughts.
    """
    shuffle: bool = True
    """Use a new seeded order in every epoch."""
    on_bad_answer: Literal["refuse", "drop"] = "refuse"
    """Action for a problem that has no answer, or an answer that the reward can't parse or scores as wrong.
    ``refuse``: the run does not start. ``drop``: the problem is left out, and counted.
    """

    @property
    def train_files(self) -> tuple[TrainingFile, ...]:
        """``train`` as a list of files, also if it is a single path."""
        if isinstance(self.train, str):
            return (TrainingFile(path=self.train),)
        return tuple(self.train)

    @property
    def evaluation_files(self) -> dict[str, ProblemFile]:
        """``evaluation`` with a ``ProblemFile`` for each set, also for a set that is only a path."""
        files: dict[str, ProblemFile] = {}
        for name, file in self.evaluation.items():
            files[name] = ProblemFile(path=file) if isinstance(file, str) else file
        return files


OnTimeout = Literal["zero", "unavailable"]
REWARD_OF_ENVIRONMENT = "environment"
"""``reward.name`` of a run whose environment gives every reward. Its problems need no answers."""
TextForm = Literal["answer", "text", "special-text"]


class RewardTerm(Section):
    """A reward and how it is called."""

    name: str
    """Name in ``megatron_dppo.rewards``, or ``package.module:function`` (or class) of your own."""
    weight: float = 1.0
    """Factor of this reward's value in the sum over all rewards of a response."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The reward's own settings, by name; docs/rewards.md lists the settings of this package's rewards."""
    reads: TextForm | None = None
    """The form of a response that the reward gets; docs/rewards.md. Empty: ``answer`` for the rewards that compare
    answers (exact_integer, math_verify, reasoning_gym), ``text`` for all others.

    """
    timeout_s: float = Field(default=10.0, gt=0)
    """Longest time for one call. A longer call is killed, and ``on_timeout`` decides its result."""
    on_timeout: OnTimeout = "zero"
    """Result of a call that took too long or whose process died. ``zero``: the response scores 0. ``unavailable``: a
    service is assumed to be the cause, and the response is scored again, up to ``attempts`` times. An asynchronous
    reward is always ``unavailable``.
    """
    workers: int = Field(default=2, gt=0, le=1024)
    """Worker processes of this reward in each data-parallel leader."""
    batch_size: int = Field(default=32, gt=0, le=4096)
    """A function that scores several responses gets at most this number of responses in one call. An asynchronous
    function has at most this number of calls at the same time in each worker.
    """
    memory_gib: int = Field(default=4, gt=0, le=1 << 20)
    """Address space of each worker process and its children, in GiB; a call that maps more fails."""
    attempts: int = Field(default=4, gt=0, le=100)
    """Attempts to score a response whose reward is unavailable (a service does not answer). After the last attempt,
    another response replaces the unscored one.
    """
    passed_variables: list[str] = Field(default_factory=list)
    """Environment variables with credentials that are passed on to the worker processes, in addition to the variable
    that ``options.api_key_variable`` names; docs/environments.md#keys.
    """


class RewardConfig(RewardTerm):
    """The rewards of responses; docs/rewards.md."""

    name: str = "math_verify"
    """Name in ``megatron_dppo.rewards``, or ``package.module:function`` (or class) of your own."""
    further: dict[str, RewardTerm] = Field(default_factory=dict)
    """Further rewards, by a name for metrics and samples; null removes a reward of the configuration's ``base``."""
    column: str | None = None
    """Entry of a problem's metadata with the name of its reward, or a list of names: the key of a further reward, or
    ``name`` without the part before its colon. Empty: all rewards score all problems.
    """
    max_replacements: int = Field(default=3, ge=0, le=100)
    """Rounds that replace responses without a reward by other responses to the same problems. The run ends if some
    responses have no reward after the last round.
    """

    @property
    def first(self) -> str:
        """``name`` without the part before its colon; this reward's key in ``terms``."""
        return self.name.rpartition(":")[2]

    @property
    def terms(self) -> dict[str, RewardTerm]:
        """All rewards by name."""
        return {self.first: self, **self.further}

    def names_for(self, metadata: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the rewards that score a problem with this metadata.

        Raises ValueError if the metadata names no reward, or an unknown one.
        """
        if self.column is None:
            return tuple(self.terms)
        value = metadata.get(self.column)
        names = value if isinstance(value, list) else [value]
        if not names or any(not isinstance(name, str) or name not in self.terms for name in names):
            raise ValueError(
                f"its metadata has {value!r} as {self.column!r} (reward.column), expected rewards of this run: "
                f"{', '.join(self.terms)}"
            )
        # Keep the order of the configuration, and name a reward once.
        return tuple(name for name in self.terms if name in names)


Credit = Literal["turn", "trajectory"]


class EnvironmentConfig(Section):
    """The environment that answers the policy's turns, in training and evaluation; docs/environments.md."""

    name: str | None = None
    """Name in ``megatron_dppo.environments``, or ``package.module:Class``. Empty: no environment; a response has one
    turn, and ``reward.name`` scores it.
    """
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the class."""
    credit: Credit = "trajectory"
    """Which reward becomes the advantage of a token. ``trajectory``: the reward of the whole trajectory. ``turn``: the
    reward from the token's turn on; docs/environments.md#credit.
    """
    role: str = "user"
    """Role of the environment's messages in the chat template: ``user``, ``tool``."""
    max_turns: int = Field(default=8, gt=0)
    """Largest number of turns of the policy, each of at most ``rollout.max_response_tokens`` tokens; an episode that
    has used all turns is truncated.
    """
    cut_turns: Literal["end", "answer"] = "end"
    """Result of a turn that ``rollout.max_response_tokens`` cuts off. ``end``: the episode ends as truncated.
    ``answer``: the environment answers the turn, and the episode continues.
    """
    max_tokens: int | None = Field(default=None, gt=0)
    """Largest number of tokens of an episode, its prompt and all its branches together; a longer episode is truncated.
    Empty: the sum of the largest prompt, turns and observations.
    """
    max_observation_tokens: int = Field(default=1024, gt=0)
    """Largest number of tokens of one observation, including the chat template's tokens. A longer observation is a
    fault of the episode.
    """
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for an answer of the environment. A later answer is a fault of the episode."""
    retries: int = Field(default=2, ge=0)
    """Largest number of faults of an episode. After each, the episode's turns are replayed in a new environment; then
    another response replaces the episode.
    """
    workers: int = Field(default=1, gt=0, le=1024)
    """Worker processes for environments in each data-parallel leader; each runs many environments at the same time."""
    concurrent: int | None = Field(default=None, gt=0)
    """Episodes that are open at the same time in each data-parallel leader; further episodes wait. Empty: four times
    ``rollout.max_concurrent_requests``, because some environments compute while other turns are sampled.
    """
    memory_gib: int = Field(default=4, gt=0, le=1 << 20)
    """Address space of each worker process, in GiB; an environment that maps more fails. Commands of ``agent`` have no
    limit.
    """
    passed_variables: list[str] = Field(default_factory=list)
    """Environment variables that are passed on to the worker processes and to commands of ``agent``, such as the key of
    a tool. Variables without secrets, such as PATH, are passed on in any case; docs/environments.md#keys.
    """

    def longest(self, prompt: int, response: int) -> int:
        """Return the length of the longest sequence in tokens: ``max_tokens`` with its default filled in.

        ``prompt`` and ``response`` are the lengths of the longest prompt and of the longest turn, in tokens.
        """
        if self.name is not None and self.max_tokens is not None:
            return self.max_tokens
        return prompt + self.longest_continuation(response)

    def longest_continuation(self, response: int) -> int:
        """Return the largest number of tokens that follow a prompt in its branch. ``response``: as in ``longest``."""
        if self.name is None:
            return response
        tokens = self.max_turns * (response + self.max_observation_tokens)
        if self.max_tokens is None:
            return tokens
        # The shortest prompt, of one token, leaves the most.
        return min(tokens, self.max_tokens - 1)
