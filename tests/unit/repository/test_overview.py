"""docs/overview.md's walks have the files that a traced training step enters; every file that the page names exists."""

import re
import sys
from pathlib import Path

import pytest

from megatron_dppo.model.families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from tools import trace_walk  # noqa: E402
from tools.trace_walk import Entry, Walk  # noqa: E402

OVERVIEW = (ROOT / "docs" / "overview.md").read_text()
WRITTEN = trace_walk.walks_on(OVERVIEW)


@pytest.mark.parametrize("title", [walk.title for walk in trace_walk.WALKS])
def test_the_files_of_a_walk_are_there(title):
    assert len(WRITTEN[title]) > 5
    assert all((ROOT / name).is_file() for name in WRITTEN[title])


def test_the_page_has_no_other_walk():
    walks = OVERVIEW.split("## Walks\n")[1].split("\n## ")[0]
    assert re.findall(r"^### (.*)$", walks, re.MULTILINE) == list(WRITTEN)


def test_the_page_is_what_the_tool_would_write():
    assert trace_walk.page_with(WRITTEN, OVERVIEW) == OVERVIEW
    title, files = next(iter(WRITTEN.items()))
    shorter_page = trace_walk.page_with({title: files[:1]}, OVERVIEW)
    assert trace_walk.walks_on(shorter_page) == {**WRITTEN, title: files[:1]}


def entry(seconds: float, process: str, event: str, function: str) -> Entry:
    return Entry(seconds, process, event, function)


def test_a_walk_is_of_the_last_step_and_of_its_processes():
    walk = Walk("w", "loop/a.py A.start", "loop/a.py A.end", frozenset({"rank 0", "server"}))
    entries = [
        entry(1, "rank 0", "call", "loop/a.py A.start"),
        entry(2, "rank 0", "call", "data/first_step.py f"),
        entry(3, "rank 0", "return", "loop/a.py A.end"),
        entry(4, "rank 0", "call", "loop/a.py A.start"),
        entry(5, "server", "call", "engine/b.py f"),
        entry(6, "rank 1", "call", "data/other_rank.py f"),
        entry(7, "rank 0", "call", "system/files.py helper"),
        entry(8, "rank 0", "call", "engine/b.py again"),
        entry(9, "rank 0", "return", "loop/a.py A.end"),
        entry(10, "rank 0", "call", "data/after.py f"),
    ]
    assert trace_walk.files_of(walk, entries) == [
        "megatron_dppo/loop/a.py",
        "megatron_dppo/engine/b.py",
    ]


def test_a_walk_that_never_began_is_an_error():
    walk = Walk("w", "loop/a.py A.start", "loop/a.py A.end", frozenset({"rank 0"}))
    with pytest.raises(ValueError, match=r"A\.start"):
        trace_walk.files_of(walk, [entry(1, "rank 0", "call", "loop/b.py f")])


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("# 0 python -m megatron_dppo.train c.yaml", "rank 0"),
        ("#  python -m megatron_dppo.train c.yaml", "supervisor"),
        ("# 0 python -m megatron_dppo.engine.launch_server --config x", "server"),
        (
            "#  python -m megatron_dppo.system.fork_server megatron_dppo.cpu.engine.libraries",
            "server",
        ),
    ],
)
def test_the_command_line_names_the_process(header, kind):
    assert trace_walk.kind_of(header) == kind


def test_a_file_of_one_trace_alone_is_a_difference():
    written = {"first": ["loop/a.py", "loop/b.py"], "second": ["engine/c.py"]}
    other_order = {"first": ["engine/c.py", "loop/b.py"], "second": ["loop/a.py"]}
    assert trace_walk.differences(other_order, written) == []
    other_files = {"first": ["loop/a.py", "loop/d.py"], "second": ["engine/c.py"]}
    assert trace_walk.differences(other_files, written) == [
        "loop/b.py: in the walks, not entered",
        "loop/d.py: entered, not in the walks",
    ]


def test_a_file_that_a_thread_enters_beside_the_walks_is_no_difference():
    written = {"first": ["megatron_dppo/loop/a.py", "megatron_dppo/loop/b.py"]}
    traced = {"first": ["megatron_dppo/loop/a.py"]}
    assert trace_walk.differences(traced, written) != []
    entries = [Entry(1.0, "rank 0", "call", "loop/b.py B.write")]
    assert trace_walk.differences(traced, written, entries) == []


def test_every_file_that_the_overview_names_is_there():
    names = re.findall(r"`([\w/]+\.py)`", OVERVIEW)
    found = [n for n in names if (ROOT / n).is_file() or (ROOT / "megatron_dppo" / n).is_file()]
    assert len(names) > 15
    assert found == names


def test_the_readme_names_every_model_family():
    section = (ROOT / "README.md").read_text().split("## Which models\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+)`\s\(", section)) == FAMILIES.keys()
