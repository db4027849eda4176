"""The section ``data``: files of problems, and how problems are put to the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from megatron_dppo.config.section import Section


class ProblemFile(Section):
    """A file of problems: JSON Lines, or Parquet, with a prompt and an answer in each record."""

    path: str
    """JSONL or Parquet file."""
    prompt_key: str | None = None
    """Where a record has its prompt, text or chat messages; ``a.b`` for a field of a structure. Empty:
    ``prompt``, ``problem`` or ``question``."""
    answer_key: str | None = None
    """Where it has its answer. Empty: ``answer``, ``reward_model.ground_truth`` or ``solution``."""


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
    """JSONL or Parquet file of training problems, or a list of such files."""
    evaluation: dict[str, EvaluationFile] = Field(default_factory=dict)
    """Name -> file of held-out problems; null takes a set away that another file names."""
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
