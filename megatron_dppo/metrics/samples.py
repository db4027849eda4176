"""Reading what the model says: the responses that a run keeps of each step, by kind.

A run keeps a few responses of every training step and of every evaluation, with reward and reason, in
``samples.jsonl``. Without ``--step`` the newest are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from megatron_dppo.logging import fatal
from megatron_dppo.metrics.records import SAMPLES_FILE, RecordsError, read_step_lines
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import write_atomically

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


@dataclass(frozen=True)
class SummaryTable:
    """A table of strings; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1em auto; max-width: 72em; padding: 0 1em;
  color: #1b1b1b; background: #fff; overflow-wrap: anywhere }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
.table { overflow-x: auto }
table { border-collapse: collapse; margin: .5em 0 1.5em; overflow-wrap: normal }
"""


def html_page(title: str, style: str, body: str) -> str:
    """A page with ``body``, which is HTML already, under a heading: one file, no scripts, no external resources, fit
    for a phone. ``style``: CSS beside the frame's.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{_PAGE_STYLE}{style}</style></head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


KINDS: dict[str, tuple[str, Callable[[Sample], bool]]] = {
    "right": ("that earned something", lambda sample: sample.reward > 0),
    "wrong": ("that earned nothing, or less", lambda sample: sample.reward <= 0),
    "truncated": ("that hit the length limit", lambda sample: sample.truncated),
    "masked": (
        "with tokens that the mask kept from training",
        lambda sample: bool(sample.masked),
    ),
}
"""Option -> its help, and the samples that it chooses."""
_STYLE = """
article { border-top: 1px solid #ddd; padding: .6em 0 }
p { margin: .2em 0 } .about { color: #555; font-size: .85em }
.right { color: #00691f } .wrong { color: #a3000f }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; margin: .3em 0;
  padding: .4em .6em; background: #f6f6f6; border-radius: 4px; unicode-bidi: isolate }
pre.prompt { color: #666 }
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; exits with status 2 and a message where there is nothing to show."""
    options = _parser().parse_args(arguments)
    try:
        samples = matching(options)
    except RunError as error:
        fatal(str(error))
    title = f"Samples of {options.run}"
    if options.html:
        page = options.run / "samples.html" if options.html is True else Path(options.html)
        write_atomically(page, html(title, samples))
        print(f"{page}: {len(samples)} samples")
    else:
        show(samples)


def matching(options: argparse.Namespace) -> list[Sample]:
    """The samples that the options ask for, the newest step first.

    Raises RecordsError where there are none; the message says what there is instead.
    """
    kinds = [kind for kind in KINDS if getattr(options, kind)]
    recorded = list(read_samples(options.run))
    chosen = [
        sample
        for sample in recorded
        if options.step in (None, sample.step)
        and options.set in (None, sample.set)
        and all(KINDS[kind][1](sample) for kind in kinds)
    ]
    if not chosen:
        steps, sets = [s.step for s in recorded], sorted({s.set for s in recorded})
        there = (
            f"{len(recorded)} samples of steps {min(steps)} to {max(steps)}, sets {', '.join(sets)}"
            if recorded
            else "none yet"
        )
        raise RecordsError(f"{options.run}: no such sample; recorded are {there}")
    return list(islice(chosen, options.limit or None))


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


def show(samples: Sequence[Sample]) -> None:
    """Print the samples, the newest last: at the prompt."""
    console = Console(highlight=False, markup=False)
    for sample in reversed(samples):
        first, last = about(sample)
        earned = "green" if sample.reward > 0 else "red"
        for text, style in (
            (first, "bold"),
            (printable(sample.prompt), "dim"),
            (printable(sample.response), ""),
            (printable(last) + "\n", earned),
        ):
            console.print(Text(text, style=style), soft_wrap=True)


def html(title: str, samples: Sequence[Sample]) -> str:
    """The samples as one page, all text escaped."""
    articles = []
    for sample in samples:
        first, last = map(escape, about(sample))
        earned = "right" if sample.reward > 0 else "wrong"
        articles.append(
            f'<article><p class="about">{first}</p>'
            f'<pre class="prompt">{escape(printable(sample.prompt))}</pre>'
            f"<pre>{escape(printable(sample.response))}</pre>"
            f'<p class="{earned}">{last}</p></article>'
        )
    return html_page(title, _STYLE, "\n".join(articles))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-dppo samples", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory (run.directory)")
    parser.add_argument("--step", type=int, help="of this step; 0: before training")
    parser.add_argument("--set", help="'training', or the name of a held-out set")
    earned = parser.add_mutually_exclusive_group()
    for kind, (meaning, _) in KINDS.items():
        group = earned if kind in ("right", "wrong") else parser
        group.add_argument(f"--{kind}", action="store_true", help=f"those {meaning}")
    parser.add_argument("--limit", type=int, default=10, help="at most so many (10); 0: all")
    parser.add_argument(
        "--html", nargs="?", const=True, metavar="FILE", help="write a page (RUN/samples.html)"
    )
    return parser


if __name__ == "__main__":
    main()
