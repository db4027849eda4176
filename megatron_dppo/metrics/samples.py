"""Samples: the responses that a run keeps of each step, with reward and reason.

A run keeps a few responses of every training step and of every evaluation in ``samples.jsonl``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from megatron_dppo.metrics.records import SAMPLES_FILE, RecordsError, read_step_lines

LONGEST_TEXT = 16_384
"""Characters of a prompt or response that are kept: half of them from each end."""
TRAINING = "training"
"""The set of the responses that were trained on."""


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        step: that was trained on it, or that the policy had been trained for when it was evaluated.
        set: ``training``, or the name of a held-out set.
        problem, sample: the problem's id in its file, and the response's number in its group.
        prompt, response: all tokens as text, special ones too; long ones are cut in the middle.
        answer: the gold answer.
        reward: that the response earned.
        reason: of the reward, in words.
        truncated: the response hit the length limit.
        tokens: of the response.
        advantage: None in an evaluation.
        masked: tokens that the mask kept from training; None in an evaluation, and where nothing says.
        components: of the reward, by name; empty where nothing says.
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
        """What ``to_json`` gave. Raises KeyError where something is missing but components, which early runs lack."""
        return cls(
            **{f.name: line[f.name] for f in fields(cls)[:-1]},
            components=line.get("components", {}),
        )


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """``text``, or both its ends with the number of characters between them, which were left out."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def console_lines(sample: Sample, longest: int = 300) -> list[str]:
    """A sample for the console: what it is of, its prompt, its response and its reward."""
    gained = "" if sample.advantage is None else f", A = {sample.advantage:+.3g}"
    masked = f", {sample.masked} of {sample.tokens} tokens masked" if sample.masked else ""
    return [
        f"sample of {sample.set}, step {sample.step}, problem {sample.problem}: "
        f"{one_line(shortened(sample.prompt, longest))}",
        f"  {one_line(shortened(sample.response, longest))}",
        f"  reward {sample.reward:g}{_parts(sample)}{gained}{masked}: {sample.reason}",
    ]


def _parts(sample: Sample) -> str:
    """The reward's components in brackets; nothing where it has none."""
    named = ", ".join(f"{name} {value:g}" for name, value in sample.components.items())
    return f" ({named})" if named else ""


def printable(text: str) -> str:
    """``text`` with unprintable characters, a terminal's commands among them, as escapes; line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """As ``printable``, line ends marked."""
    return printable(text).replace("\n", "\u23ce")


def read_samples(directory: str | Path) -> Iterator[Sample]:
    """The samples of the run in ``directory``, newest step first. Raises RecordsError."""
    path = Path(directory) / SAMPLES_FILE
    if not path.is_file():
        raise RecordsError(f"{directory}: no {SAMPLES_FILE} in it, expected the folder of a run")
    lines = read_step_lines(path)
    # A stable sort: those of one step stay in order.
    for line in sorted(lines, key=lambda line: -line["step"]):
        try:
            yield Sample.from_json(line)
        except KeyError as error:
            raise RecordsError(
                f"{path}: a sample of step {line['step']} has no {error.args[0]!r}"
            ) from error


def about(sample: Sample) -> tuple[str, str]:
    """What a sample is of, and what it earned, as two lines."""
    facts = [f"{sample.tokens} tokens", *(["truncated"] if sample.truncated else [])]
    if sample.advantage is not None:
        facts.append(f"A = {sample.advantage:+.3g}")
    if sample.masked:
        facts.append(f"{sample.masked} masked")
    return (
        f"step {sample.step}, {sample.set}, problem {sample.problem}, response {sample.sample}: "
        + ", ".join(facts),
        f"reward {sample.reward:g}{_parts(sample)}: {sample.reason}",
    )
