"""Sections of what is learned from: problems, who answers the policy, and the rewards of responses. ``schema.py`` has
the others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ProblemFile(Section):
    """Files of problems: JSON Lines, CSV or Parquet, with a prompt and an answer in each record."""

    path: str
    """JSONL, CSV, TSV or Parquet file (text also as .gz), a folder of such files, or a glob (docs/data.md)."""
    prompt_key: str | None = None
    """Where a record has its prompt, text or chat messages; ``a.b`` for a field of a structure. Empty: under a usual
    name, docs/data.md#records."""
    answer_key: str | None = None
    """Where it has its answer; ``conversations[-1].value`` for the last message of a conversation. Empty: under a usual
    name."""
    metadata_key: str | None = None
    """Where it has an object of whatever else a reward may see; ``*``: all columns of the record. Empty: ``metadata``,
    ``extra_info`` or ``info``, where there is one."""


class TrainingFile(ProblemFile):
    """One of several files of training problems."""

    weight: float | None = Field(default=None, gt=0)
    """Share of the prompts that come from this file, relative to the others'. Empty for all files:
    they are one set, each problem as frequent as any other."""


TrainingFiles = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TrainingFile], Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "text"),
]
EvaluationFile = Annotated[
    Annotated[str, Tag("text")] | Annotated[ProblemFile, Tag("table")],
    Discriminator(lambda value: "table" if isinstance(value, dict | ProblemFile) else "text"),
]


class DataConfig(Section):
    """Problems to train and to be evaluated on, and how they are put to the model; docs/data.md."""

    train: TrainingFiles
    """JSONL, CSV or Parquet file of training problems, a folder or a glob of such files, or a list of any of these."""
    evaluation: dict[str, EvaluationFile] = Field(default_factory=dict)
    """Name -> file, folder or glob of held-out problems; null takes a set away that another file names."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """Longer prompts are dropped at load, and counted. A start is refused where fewer problems are left than
    ``rollout.prompts_per_step``."""
    apply_chat_template: bool = True
    """Wrap a plain-text prompt as one user message in the tokenizer's chat template."""
    system_prompt: str | None = None
    """A system message before each prompt, in training and evaluation."""
    prompt_template: str | None = None
    """Text around each problem, which stands where this says ``{prompt}``, in training and
    evaluation. Empty: the problem alone."""
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as ``{enable_thinking: false}``: for every prompt in training and
    evaluation, and for the turns of environments and agents."""
    shuffle: bool = True
    """A new seeded order in every epoch."""
    on_bad_answer: Literal["refuse", "drop"] = "refuse"
    """Where an answer is missing or empty, the reward can't parse it, or would not give it to the answer itself:
    refuse to start, or leave the problem out and count it."""

    @property
    def train_files(self) -> tuple[TrainingFile, ...]:
        """The training files, whichever form names them."""
        if isinstance(self.train, str):
            return (TrainingFile(path=self.train),)
        return tuple(self.train)

    @property
    def evaluation_files(self) -> dict[str, ProblemFile]:
        """The files of the held-out sets by name, whichever form names them."""
        return {
            name: ProblemFile(path=file) if isinstance(file, str) else file
            for name, file in self.evaluation.items()
        }


OnTimeout = Literal["zero", "unavailable"]


class RewardTerm(Section):
    """A reward, and how it is asked for."""

    name: str
    """A name in ``megatron_dppo.rewards``, or ``package.module:function`` (or class) of your own."""
    weight: float = 1.0
    """Factor of its value in a response's reward, which is the sum over all rewards."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its own settings, by name; docs/rewards.md lists those of the rewards here."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Longest time for one call; what takes longer is killed, and ``on_timeout`` says what follows."""
    on_timeout: OnTimeout = "zero"
    """What it means where a call took too long, or its process died. ``zero``: the response made it do so; it scores 0,
    and is counted. ``unavailable``: a service did, and the response is scored anew, as ``attempts`` says. An
    asynchronous reward is always ``unavailable``: it waits for others."""
    workers: int = Field(default=2, gt=0, le=1024)
    """Processes that it runs in, in each data-parallel leader."""
    batch_size: int = Field(default=32, gt=0, le=4096)
    """Responses in one call of a batch form, and at the same time in each process of an asynchronous one."""
    memory_gib: int = Field(default=4, gt=0, le=1 << 20)
    """Address space of each of these processes and of what it starts, in GiB; a call that maps more fails."""
    attempts: int = Field(default=4, gt=0, le=100)
    """How often a response is tried in all whose reward could not be had (a service that is away), with growing pauses
    from 0.5 s. Then another response takes its place."""
    passed_variables: list[str] = Field(default_factory=list)
    """Variables of the environment that hold keys and that its processes get all the same, beside those that
    ``options`` names (``api_key_variable``); docs/environments.md#keys."""


class RewardConfig(RewardTerm):
    """The rewards of responses; docs/rewards.md."""

    name: str = "math_verify"
    """A name in ``megatron_dppo.rewards``, or ``package.module:function`` (or class) of your own."""
    further: dict[str, RewardTerm] = Field(default_factory=dict)
    """Further rewards, by a name for metrics and samples; null takes one away that another file names."""
    max_replacements: int = Field(default=3, ge=0, le=100)
    """Rounds in which responses without a reward are replaced by others to the same problems; a run ends where some
    still have none after them."""

    @property
    def first(self) -> str:
        """What the first one is called among ``terms``: as its function."""
        return self.name.rpartition(":")[2]

    @property
    def terms(self) -> dict[str, RewardTerm]:
        """All rewards by name."""
        return {self.first: self, **self.further}


Credit = Literal["turn", "trajectory"]


class EnvironmentConfig(Section):
    """Who answers the policy's turns, in training and evaluation; docs/environments.md."""

    name: str | None = None
    """A name in ``megatron_dppo.environments``, or ``package.module:Class``. Empty: none, a response has one turn and
    ``reward.name`` scores it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the class."""
    credit: Credit = "trajectory"
    """What a token's advantage is of: the whole trajectory's reward, or what was earned from its turn on, each compared
    with the group's; docs/environments.md#credit. Turns are paired as the branches lie, not by time."""
    role: str = "user"
    """Role of what the environment says, as the chat template knows it: ``user``, ``tool``."""
    max_turns: int = Field(default=8, gt=0)
    """Turns of the policy, each of at most ``rollout.max_response_tokens``; an episode that has used them up is
    truncated."""
    cut_turns: Literal["end", "answer"] = "end"
    """After a turn that ``rollout.max_response_tokens`` cuts off: the episode ends as truncated, or the environment
    answers the turn and the episode goes on."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Tokens of an episode with its prompt, of all its branches together; one that gets there is truncated. Empty: as
    many as prompt, turns and observations may have in one."""
    max_observation_tokens: int = Field(default=1024, gt=0)
    """Tokens of what the environment says at once, the chat template's included; more is a fault."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time for an answer of the environment; longer is a fault."""
    retries: int = Field(default=2, ge=0)
    """Faults of an episode that are made good by giving the same turns to a new environment. With one more its response
    is replaced by another one to the same problem, up to ``reward.max_replacements`` times."""
    workers: int = Field(default=1, gt=0, le=1024)
    """Processes for environments in each data-parallel leader; each runs many side by side."""
    concurrent: int | None = Field(default=None, gt=0)
    """Episodes that are open at the same time in each data-parallel leader; others wait. Empty: four times
    ``rollout.max_concurrent_requests``, as environments work while others' turns are sampled."""
    memory_gib: int = Field(default=4, gt=0, le=1 << 20)
    """Address space of each of these processes, in GiB: an environment that maps more fails. Commands of ``agent`` are
    not bound by it."""
    passed_variables: list[str] = Field(default_factory=list)
    """Variables of the environment that these processes, and commands of ``agent``, get beside harmless ones, such as
    the key of a tool; docs/environments.md#keys."""

    def longest(self, prompt: int, response: int) -> int:
        """Tokens of the longest sequence, ``max_tokens`` with its default filled in. ``prompt``, ``response``: of the
        longest prompt and turn."""
        if self.name is None:
            return prompt + response
        if self.max_tokens is not None:
            return self.max_tokens
        return prompt + self.max_turns * (response + self.max_observation_tokens)
