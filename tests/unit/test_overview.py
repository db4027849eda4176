"""docs/overview.md's walks through the files: short, of files that are there, each reached from one before it."""

import ast
import re
from pathlib import Path

import pytest

from megatron_dppo.model.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
OVERVIEW = (ROOT / "docs" / "overview.md").read_text()
MOST_FILES = {
    "A prompt, file by file": 25,
    "A token, file by file": 14,
    "A weight update, file by file": 9,
    "An engine's death, file by file": 10,
    "A Slurm job, file by file": 28,
}


def files_of(section: str) -> list[Path]:
    text = OVERVIEW.split(f"## {section}\n")[1].split("\n## ")[0]
    return [ROOT / name for name in re.findall(r"^\d+\. `([^`]+)`", text, re.MULTILINE)]


@pytest.mark.parametrize("section", MOST_FILES)
def test_the_walk_is_short_and_its_files_are_there(section):
    files = files_of(section)
    assert 1 < len(files) <= MOST_FILES[section]
    assert all(path.is_file() for path in files)


@pytest.mark.parametrize("section", ["A token, file by file", "A weight update, file by file"])
def test_each_file_of_a_walk_is_imported_by_one_before_it(section):
    files = files_of(section)
    for place, path in enumerate(files[1:], start=1):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        before = [name for earlier in files[:place] for name in imports(earlier)]
        assert module in before, f"nothing before {path.name} imports it"


def imports(path: Path) -> list[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    found = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module]
    return [n.module for n in found] + [f"{n.module}.{a.name}" for n in found for a in n.names]


def test_every_file_that_the_overview_names_is_there():
    names = re.findall(r"`([\w/]+\.py)`", OVERVIEW)
    found = [n for n in names if (ROOT / n).is_file() or (ROOT / "megatron_dppo" / n).is_file()]
    assert len(names) > 15
    assert found == names


def test_the_readme_names_every_model_family():
    section = (ROOT / "README.md").read_text().split("## Which models\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+)`\s\(", section)) == FAMILIES.keys()
