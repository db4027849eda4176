"""The page docs/paper.md: the paper figure by figure, made from examples/paper.yaml.

python -m examples.recipes.paper_page --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from examples.recipes.paper import experiments, figures, runs_of, tables_of
from examples.recipes.paper_toys import TOYS

PAGE = Path("docs/paper.md")
PICTURES = PAGE.parent / "figures" / "paper"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
"""The generated part of the page stands between these two lines."""
_NUMBERED = ("published", "scripts", "presets")


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
    lines = ["| | shows | runs | steps |", "|---|---|---|---|"]
    for name, row in figures().items():
        steps = {str(count) for count in steps_of_figure(name).values()} or {"-"}
        recipes = [_recipe_cell(experiment) for experiment in row["experiments"]]
        anchor = name.lower().replace(" ", "-")
        runs = " ".join(recipes)
        lines.append(
            f"| [{name}](#{anchor}) | {row['shows']} | {runs} | {', '.join(sorted(steps))} |"
        )
    for name in figures():
        lines.extend(["", *_section(name)])
    lines.extend(["", "## The numbers", "", *_numbers()])
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
    commands = [run.command for run in runs_of(figure)]
    commands.extend(row.get("commands", ()))
    if "panels" in row:
        commands.append(f'python -m examples.recipes.paper_figures "{figure}"')
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
    differences = list(_differences(row["experiments"]))
    if differences:
        yield ""
        yield from differences


def _picture(figure: str) -> Iterator[str]:
    path = picture_of(figure)
    yield f"![{figure}, from toy runs]({path.relative_to(PAGE.parent)})"
    yield ""
    yield f"*{_caption(figures()[figure]['experiments'])}*"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].removesuffix(".") + "."


def _caption(names: list[str]) -> str:
    parts = []
    for name in names:
        if experiments()[name]["recipe"] is None:
            continue
        toy = TOYS[name]
        changes = "".join(f", {change}" for change in toy.changes)
        parts.append(
            f"{experiments()[name]['title']}: task {toy.task}, mismatch {toy.mismatch}{changes}"
        )
    return f"Toy runs on this project's own machine, one seed ({'; '.join(parts)})."


def _differences(names: list[str]) -> Iterator[str]:
    """Yield a line for each experiment that differs from the paper."""
    for name in names:
        row = experiments()[name]
        notes = [*row.get("departs", ()), *_script_differences(name)]
        if "left_out" in row:
            notes.append(row["left_out"])
        if notes:
            yield f"- {row['title']}: {' '.join(_sentence(note) for note in notes)}"


def _script_differences(name: str) -> Iterator[str]:
    for table in experiments()[name].get("scripts", ()):
        for key, value in table.get("differs", {}).items():
            yield f"The script {table['source']} has `{key}` {value}"


def _published(rows: Mapping[str, list[float]]) -> Iterator[str]:
    yield "| | length-controlled win rate | win rate | characters |"
    yield "|---|---:|---:|---:|"
    for name, values in rows.items():
        yield f"| {name} | {' | '.join(str(value) for value in values)} |"


def _numbers() -> Iterator[str]:
    """Yield a table of all published numbers with their sources, and a table of what is published nowhere."""
    yield "| experiment | source | numbers |"
    yield "|---|---|---|"
    for name, row in experiments().items():
        for source, values in tables_of(name, _NUMBERED):
            numbers = ", ".join(_number(key, value) for key, value in values.items())
            yield f"| {row['title']} | {source} | {numbers} |"
    yield ""
    yield "Published nowhere, so chosen here:"
    yield ""
    for row in experiments().values():
        if row.get("chosen"):
            yield f"- {row['title']}: {'; '.join(row['chosen'])}"


def _number(key: str, value: object) -> str:
    if isinstance(value, Mapping):
        inner = " ".join(f"{name} {number}" for name, number in value.items())
        return f"`{key}` {inner}"
    return f"`{key}` {value}"


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
