"""Links of the project's pages lead to existing files and headings, and pages name only existing configuration keys."""

import re
from pathlib import Path

import pytest

from megatron_dppo.config.counterparts import COUNTERPARTS
from megatron_dppo.config.errors import dotted_paths
from megatron_dppo.config.schema import SupervisedConfig, TrainConfig

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("docs", "examples", "megatron_dppo", "slurm", "tools")
PAGES = sorted([*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))])
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes for a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page}: no {link}"
        if anchor:
            assert anchor in anchors(target), f"{page}: no heading {link}"


SPAN = re.compile(r"^```.*?^```|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
CONFIGURED = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
KEYS = {path for schema in (TrainConfig, SupervisedConfig) for path in dotted_paths(schema)}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(SECTIONS))})(?:\.[a-z_0-9]+)+(?![\w/(-])")
FREE_TABLES = ("megatron", "sglang", "options", "evaluation", "further")
FREE = {key for key in KEYS if key.endswith(FREE_TABLES)}
"""Tables whose keys a library or the user names."""
FILES = (".md", ".py", ".sbatch", ".yaml", ".json", ".png", ".html", ".safetensors", ".jsonl")


NO_KEYS = {"optimizer.state", "model.visual"}
"""Beginnings of tensors' names (docs/checkpoints.md, docs/extending.md), which look like keys."""


FOREIGN_KEYS = {
    name for row in COUNTERPARTS for package_names in row.names.values() for name in package_names
}
"""Keys of other packages, which docs/coming_from.md has beside this project's keys."""


def is_key(path: str) -> bool:
    return path in KEYS | NO_KEYS or any(path.startswith(f"{table}.") for table in FREE)


@pytest.mark.parametrize("page", CONFIGURED, ids=lambda page: page.name)
def test_every_configuration_key_that_a_page_names_is_one(page):
    spans = [span for span in SPAN.findall(page.read_text()) if span]
    named = {path for span in spans for path in PATH.findall(span) if not path.endswith(FILES)}
    if page.name == "coming_from.md":
        named -= FOREIGN_KEYS
    assert sorted(path for path in named if not is_key(path)) == []


def test_a_key_that_is_none_is_noticed():
    assert not is_key("rollout.responses_per_prompt")
    assert PATH.findall("`rollout.responses_per_prompt=4`") == ["rollout.responses_per_prompt"]
