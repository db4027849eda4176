"""Show responses of the model, with reward and reason.

A run keeps a few responses of every training step and of every evaluation in ``samples.jsonl``. Without ``--step`` the
newest samples are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from megatron_dppo.diagnostics.pages import render_page
from megatron_dppo.logging import fatal
from megatron_dppo.metrics.records import RecordsError
from megatron_dppo.metrics.samples import Sample, about, printable, read_samples
from megatron_dppo.system.arguments import count_or_zero
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import write_atomically


class SampleKind(NamedTuple):
    """A kind of samples: a clause about it, and a function that returns whether a sample is of this kind."""

    clause: str
    includes: Callable[[Sample], bool]


KINDS: dict[str, SampleKind] = {
    "right": SampleKind("that earned something", lambda sample: sample.reward > 0),
    "wrong": SampleKind("that earned nothing, or less", lambda sample: sample.reward <= 0),
    "truncated": SampleKind("that hit the length limit", lambda sample: sample.truncated),
    "masked": SampleKind(
        "with tokens that the mask kept from training", lambda sample: bool(sample.masked)
    ),
}
"""Option of the command, without its dashes -> the kind of samples that it selects."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; exits with status 2 and a message if there is nothing to show."""
    options = _parser().parse_args(arguments)
    try:
        samples = matching(options)
    except RunError as error:
        fatal(str(error))
    title = f"Samples of {options.run}"
    if options.html:
        # ``--html`` without a file is True.
        page = options.run / "samples.html"
        if options.html is not True:
            page = Path(options.html)
        write_atomically(page, html(title, samples))
        print(f"{page}: {len(samples)} samples")
    else:
        show(samples)


def matching(options: argparse.Namespace) -> list[Sample]:
    """Return the samples that match the options, the newest step first.

    Raises RecordsError if no sample matches; the message describes the recorded samples.
    """
    kinds = [kind for option, kind in KINDS.items() if getattr(options, option)]
    recorded = list(read_samples(options.run))
    matches: list[Sample] = []
    for sample in recorded:
        has_wanted_step = options.step is None or options.step == sample.step
        has_wanted_set = options.set is None or options.set == sample.set
        has_wanted_kind = all(kind.includes(sample) for kind in kinds)
        if has_wanted_step and has_wanted_set and has_wanted_kind:
            matches.append(sample)
    if not matches:
        recorded_text = "none yet"
        if recorded:
            steps = [sample.step for sample in recorded]
            sets = ", ".join(sorted({sample.set for sample in recorded}))
            recorded_text = (
                f"{len(recorded)} samples of steps {min(steps)} to {max(steps)}, sets {sets}"
            )
        raise RecordsError(f"{options.run}: no such sample; recorded are {recorded_text}")
    # A limit of 0 means no limit.
    return list(islice(matches, options.limit or None))


def show(samples: Sequence[Sample]) -> None:
    """Print the samples, the newest last, so that it is next to the shell's prompt."""
    console = Console(highlight=False, markup=False)
    for sample in reversed(samples):
        head, tail = about(sample)
        colour = "green" if sample.reward > 0 else "red"
        for text, style in (
            (head, "bold"),
            (printable(sample.prompt), "dim"),
            (printable(sample.response), ""),
            (printable(tail) + "\n", colour),
        ):
            console.print(Text(text, style=style), soft_wrap=True)


def html(title: str, samples: Sequence[Sample]) -> str:
    """Return the samples as one HTML page, with all text escaped."""
    rows = [(sample, about(sample)) for sample in samples]
    return render_page("samples.html", title=title, samples=rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-dppo samples", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory (run.directory)")
    parser.add_argument("--step", type=count_or_zero, help="only this step; 0: before training")
    parser.add_argument("--set", help="only 'training', or this held-out set")
    exclusive_options = parser.add_mutually_exclusive_group()
    for option, kind in KINDS.items():
        group = exclusive_options if option in ("right", "wrong") else parser
        group.add_argument(f"--{option}", action="store_true", help=f"only samples {kind.clause}")
    parser.add_argument(
        "--limit", type=count_or_zero, default=10, help="samples at most (10); 0: all"
    )
    parser.add_argument(
        "--html", nargs="?", const=True, metavar="FILE", help="write a page (RUN/samples.html)"
    )
    return parser


if __name__ == "__main__":
    main()
