"""The page docs/paper.md: the paper figure by figure, made from examples/paper.yaml.

python -m examples.recipes.paper_page --write
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from examples.recipes.paper import experiments, figures, runs_of, tables_of

PAGE = Path("docs/paper.md")
PICTURES = PAGE.parent / "figures" / "paper"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
"""The generated part of the page stands between these two lines."""


def picture_of(figure: str) -> Path:
    """Return the file of a figure's picture, from toy runs."""
    return PICTURES / f"{figure.lower().replace(' ', '_')}.png"


def steps_of_figure(figure: str) -> dict[str, int]:
    """Return the last step of a figure's axis for each of its experiments that has a recipe."""
    steps = {}
    for experiment in figures()[figure]["experiments"]:
        if experiments()[experiment]["recipe"] is not None:
            steps[experiment] = _steps(figure, experiment)
    return steps


def _steps(figure: str, experiment: str) -> int:
    own_steps = figures()[figure].get("steps")
    if own_steps is not None:
        return int(own_steps)
    for _, values in tables_of(experiment, ["published"]):
        if "run.steps" in values:
            return int(values["run.steps"])
    raise KeyError(f"{figure}: no steps of {experiment}")


def generated() -> str:
    """Return the generated part of the page."""
    lines = ["| | runs | steps |", "|---|---|---|"]
    for name, row in figures().items():
        steps = {str(count) for count in steps_of_figure(name).values()} or {"-"}
        recipes = [_recipe_cell(experiment) for experiment in row["experiments"]]
        cells = [_link(name), " ".join(recipes), ", ".join(sorted(steps))]
        lines.append(f"| {' | '.join(cells)} |")
    for name in figures():
        lines.extend(["", *_section(name)])
    return "\n".join(lines)


def _recipe_cell(experiment: str) -> str:
    row = experiments()[experiment]
    if row["recipe"] is None:
        return f"({row['title']})"
    return f"`{row['recipe']}`"


def _section(figure: str) -> Iterator[str]:
    row = figures()[figure]
    yield f"### {figure}"
    yield ""
    yield f"{_sentence(row['shows'])}"
    earlier_figures = _earlier_figures(figure)
    commands = [run.command for run in runs_of(figure) if run.command not in earlier_figures]
    commands.extend(row.get("commands", ()))
    if "panels" in row:
        commands.append(f'python -m examples.recipes.paper_figures "{figure}"')
    for earlier in dict.fromkeys(earlier_figures.values()):
        yield ""
        count = list(earlier_figures.values()).count(earlier)
        yield f"It uses {'a run' if count == 1 else f'{count} runs'} of {_link(earlier)}."
    if commands:
        yield ""
        yield "```"
        yield from commands
        yield "```"
    if "published" in row:
        yield ""
        yield from _published(row["published"])
    if "panels" in row:
        yield ""
        yield from _picture(figure)
    differences = list(_differences(figure))
    if differences:
        yield ""
        yield from differences


def _earlier_figures(figure: str) -> dict[str, str]:
    """Return the figure's commands that stand in the section of an earlier figure: command -> that figure."""
    own_commands = [run.command for run in runs_of(figure)]
    found: dict[str, str] = {}
    for earlier in itertools.takewhile(lambda name: name != figure, figures()):
        for run in runs_of(earlier):
            if run.command in own_commands:
                found.setdefault(run.command, earlier)
    return found


def _link(figure: str) -> str:
    return f"[{figure}](#{figure.lower().replace(' ', '-')})"


def _picture(figure: str) -> Iterator[str]:
    path = picture_of(figure)
    yield f"![{figure}, from toy runs]({path.relative_to(PAGE.parent)})"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].removesuffix(".") + "."


def _differences(figure: str) -> Iterator[str]:
    """Yield a line for each set of differences from the paper. The first figure of an experiment has the text."""
    titles: dict[str, list[str]] = {}
    for name in figures()[figure]["experiments"]:
        row = experiments()[name]
        notes = [*row.get("departs", ()), *_script_differences(name)]
        if "left_out" in row:
            notes.append(row["left_out"])
        if not notes:
            continue
        first = next(other for other in figures() if name in figures()[other]["experiments"])
        text = " ".join(map(_sentence, notes)) if first == figure else f"as in {_link(first)}."
        titles.setdefault(text, []).append(row["title"])
    for text, titles_of_line in titles.items():
        yield f"- {'; '.join(titles_of_line)}: {text}"


def _script_differences(name: str) -> Iterator[str]:
    for table in experiments()[name].get("scripts", ()):
        for key, value in table.get("differs", {}).items():
            yield f"The script {table['source']} has `{key}` {value}"


def _published(rows: Mapping[str, list[float]]) -> Iterator[str]:
    yield "| | length-controlled win rate | win rate | characters |"
    yield "|---|---:|---:|---:|"
    for name, values in rows.items():
        yield f"| {name} | {' | '.join(str(value) for value in values)} |"


def whole() -> str:
    """Return the page with its generated part made anew."""
    text = PAGE.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: expected the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{generated()}\n{END}{tail}"


def write() -> None:
    """Write the page."""
    PAGE.write_text(whole(), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m examples.recipes.paper_page --write")
    write()
