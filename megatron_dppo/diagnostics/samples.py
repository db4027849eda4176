"""Show responses of the model, with reward and reason.

A run keeps a few responses of every training step and of every evaluation in ``samples.jsonl``. Without ``--step`` the
newest samples are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron_dppo.diagnostics.pages import render_page
from megatron_dppo.logging import fatal
from megatron_dppo.metrics.records import RecordsError
from megatron_dppo.metrics.samples import Sample, about, printable, read_samples
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import write_atomically

KINDS: dict[str, tuple[str, Callable[[Sample], bool]]] = {
    "right": ("that earned something", lambda sample: sample.reward > 0),
    "wrong": ("that earned nothing, or less", lambda sample: sample.reward <= 0),
    "truncated": ("that hit the length limit", lambda sample: sample.truncated),
    "masked": (
        "with tokens that the mask kept from training",
        lambda sample: bool(sample.masked),
    ),
}
"""Option -> the kind of its samples in words, and a function that returns whether a sample is of this kind."""


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
    kinds = [kind for kind in KINDS if getattr(options, kind)]
    recorded = list(read_samples(options.run))
    matches: list[Sample] = []
    for sample in recorded:
        has_step = options.step in (None, sample.step)
        has_set = options.set in (None, sample.set)
        if has_step and has_set and all(KINDS[kind][1](sample) for kind in kinds):
            matches.append(sample)
    if not matches:
        available_sets = "none yet"
        if recorded:
            steps = [sample.step for sample in recorded]
            sets = ", ".join(sorted({sample.set for sample in recorded}))
            available_sets = (
                f"{len(recorded)} samples of steps {min(steps)} to {max(steps)}, sets {sets}"
            )
        raise RecordsError(f"{options.run}: no such sample; recorded are {available_sets}")
    return list(islice(matches, options.limit or None))


def show(samples: Sequence[Sample]) -> None:
    """Print the samples, the newest last, so that it is next to the shell's prompt."""
    console = Console(highlight=False, markup=False)
    for sample in reversed(samples):
        head, tail = about(sample)
        earned = "green" if sample.reward > 0 else "red"
        for text, style in (
            (head, "bold"),
            (printable(sample.prompt), "dim"),
            (printable(sample.response), ""),
            (printable(tail) + "\n", earned),
        ):
            console.print(Text(text, style=style), soft_wrap=True)


def html(title: str, samples: Sequence[Sample]) -> str:
    """Return the samples as one HTML page, with all text escaped."""
    rows = [(sample, about(sample)) for sample in samples]
    return render_page("samples.html", title=title, samples=rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-dppo samples", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory (run.directory)")
    parser.add_argument("--step", type=int, help="only this step; 0: before training")
    parser.add_argument("--set", help="only 'training', or this held-out set")
    earned = parser.add_mutually_exclusive_group()
    for kind, (meaning, _) in KINDS.items():
        group = earned if kind in ("right", "wrong") else parser
        group.add_argument(f"--{kind}", action="store_true", help=f"only samples {meaning}")
    parser.add_argument("--limit", type=int, default=10, help="samples at most (10); 0: all")
    parser.add_argument(
        "--html",
        nargs="?",
        const=True,
        metavar="FILE",
        help="write a page (RUN/samples.html)",
    )
    return parser


if __name__ == "__main__":
    main()
