"""A study: claims of one question beside those of claims.py, with a family of tests and a page of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.arena.claims import Claim, Record, Side
from examples.arena.figures import curves_figure, save
from examples.arena.findings import CLAIM_TABLE, claim_row, tests_csv, verdicts
from examples.arena.run import read_results


@dataclass(frozen=True)
class Study:
    """The claims of a study and its page.

    Attributes:
        results: file of the runs. Its stem names the page, the figure and the table of tests.
        claims: the claims; their primary tests are Holm's family.
        seeds: seeds of the runs that the figure shows.
        introduction: the page's text before the table of claims.
        drawn: (setting, rule) of the figure's curves.
        metrics: metrics of the figure, with a row of panels for each.
        caption: text of the figure.
    """

    results: Path
    claims: tuple[Claim, ...]
    seeds: tuple[int, ...]
    introduction: str
    drawn: Sequence[tuple[str, str]]
    metrics: tuple[str, ...]
    caption: str

    @property
    def name(self) -> str:
        """The name of the page, without its ending."""
        return self.results.stem

    def page_of(self, records: Mapping[str, Record]) -> str:
        """Return the text of the page."""
        found = verdicts(self.claims, records)
        lines = [
            self.introduction,
            *CLAIM_TABLE,
            *(claim_row(claim, found[claim.name], is_linked=False) for claim in self.claims),
            "",
            f"![{self.caption}]({self.name}.png)",
        ]
        return "\n".join(lines) + "\n"

    def tests_of(self, records: Mapping[str, Record]) -> str:
        """Return the table of all tests, as CSV."""
        return tests_csv(self.claims, verdicts(self.claims, records), records)

    def write_page(self, folder: Path) -> None:
        """Write the page, its figure and its table of tests into ``folder``. Curves without all runs are left out."""
        records = read_results(self.results)
        drawn: list[tuple[str, str]] = []
        for setting, rule in self.drawn:
            if all(Side(setting, rule).key(seed) in records for seed in self.seeds):
                drawn.append((setting, rule))
        figure = curves_figure(drawn, self.metrics, records, self.seeds)
        save(figure, folder / f"{self.name}.png")
        (folder / f"{self.name}.md").write_text(self.page_of(records), encoding="utf-8")
        tests = self.tests_of(records)
        (folder / f"{self.name}_tests.csv").write_text(tests, encoding="utf-8")
