"""Samples: a few responses of every training step and evaluation, with reward and reason, in ``samples.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from megatron_dppo.metrics.records import SAMPLES_FILE, RecordsError, read_step_lines

LONGEST_TEXT = 16_384
"""Longer prompts and responses are shortened to this number of characters, half of it from each end."""
_CONSOLE_CHARACTERS = 300
TRAINING = "training"
"""Name of the set of the responses that were trained on."""


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        step: step that trained on the response, or number of trained steps at its evaluation.
        set: ``training``, or the name of a held-out set.
        problem, sample: the problem's id in its file, and the response's number in its group.
        prompt, response: all tokens as text, special tokens too; long texts are cut in the middle.
        answer: the gold answer.
        reward: the response's reward.
        reason: reason of the reward, in words.
        truncated: whether the response reached the length limit.
        tokens: tokens of the response.
        advantage: the response's advantage; None in an evaluation.
        masked: number of tokens that the mask kept from training; None in an evaluation, or if it is not recorded.
        components: components of the reward, by name; empty if they are not recorded.
    """

    step: int
    set: str
    problem: int
    sample: int
    prompt: str
    response: str
    answer: str
    reward: float
    reason: str
    truncated: bool
    tokens: int
    advantage: float | None = None
    masked: int | None = None
    components: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Self:
        """Return the sample from an object of ``to_json``. Raises KeyError for a missing field except components."""
        values: dict[str, Any] = {"components": line.get("components", {})}
        for sample_field in fields(cls):
            if sample_field.name != "components":
                values[sample_field.name] = line[sample_field.name]
        return cls(**values)


def shortened(text: str, max_characters: int = LONGEST_TEXT) -> str:
    """Return ``text``, or both its ends with the number of omitted characters between them."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def console_lines(sample: Sample) -> list[str]:
    """Return a sample's lines for the console: its origin, its prompt, its response and its reward."""
    advantage = ""
    if sample.advantage is not None:
        advantage = f", A = {sample.advantage:+.3g}"
    masked = ""
    if sample.masked:
        masked = f", {sample.masked} of {sample.tokens} tokens masked"
    return [
        f"sample of {sample.set}, step {sample.step}, problem {sample.problem}: "
        f"{one_line(shortened(sample.prompt, _CONSOLE_CHARACTERS))}",
        f"  {one_line(shortened(sample.response, _CONSOLE_CHARACTERS))}",
        f"  reward {sample.reward:g}{_components(sample)}{advantage}{masked}: {sample.reason}",
    ]


def _components(sample: Sample) -> str:
    """Return the reward's components in brackets; an empty text without components."""
    if not sample.components:
        return ""
    components = ", ".join(f"{name} {value:g}" for name, value in sample.components.items())
    return f" ({components})"


def printable(text: str) -> str:
    """Replace unprintable characters of ``text`` (for instance a terminal's commands) by escapes; line ends stay."""
    characters: list[str] = []
    for character in text:
        if character.isprintable() or character == "\n":
            characters.append(character)
        else:
            # The slice removes the quotes that repr adds.
            characters.append(repr(character)[1:-1])
    return "".join(characters)


def one_line(text: str) -> str:
    """Return ``printable(text)`` with the sign for a line end in place of each line end."""
    return printable(text).replace("\n", "\u23ce")


def read_samples(directory: str | Path) -> Iterator[Sample]:
    """Yield the samples of the run in ``directory``, newest step first. Raises RecordsError."""
    path = Path(directory) / SAMPLES_FILE
    if not path.is_file():
        raise RecordsError(f"{directory}: no {SAMPLES_FILE} in it, expected the folder of a run")
    lines = read_step_lines(path)
    # Sorting is stable: samples of one step stay in order.
    for line in sorted(lines, key=itemgetter("step"), reverse=True):
        try:
            yield Sample.from_json(line)
        except KeyError as error:
            raise RecordsError(
                f"{path}: a sample of step {line['step']} has no {error.args[0]!r}"
            ) from error


def about(sample: Sample) -> tuple[str, str]:
    """Return two lines about a sample: its origin, and its reward."""
    facts = [f"{sample.tokens} tokens"]
    if sample.truncated:
        facts.append("truncated")
    if sample.advantage is not None:
        facts.append(f"A = {sample.advantage:+.3g}")
    if sample.masked:
        facts.append(f"{sample.masked} masked")
    return (
        f"step {sample.step}, {sample.set}, problem {sample.problem}, response {sample.sample}: "
        + ", ".join(facts),
        f"reward {sample.reward:g}{_components(sample)}: {sample.reason}",
    )
