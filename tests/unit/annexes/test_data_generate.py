"""``megatron-dppo data generate``: problems that reasoning-gym makes, as a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_dppo.diagnostics.data import main
from megatron_dppo.rewards import find_reward
from tests.extras import NEEDS_REASONING_GYM
from tests.patience import run_patiently


@NEEDS_REASONING_GYM
def test_a_task_s_problems_are_written(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    words = ["generate", "arc_1d", "--count", "2", "--seed", "5", "--config", "max_size=12"]
    assert main([*words, "--out", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["metadata"]["task"] for line in lines] == ["arc_1d", "arc_1d"]
    with pytest.raises(SystemExit):
        main(["generate", "acre", "sudoku", "--config", "a=1", "--out", str(tmp_path / "never")])
    assert not (tmp_path / "never").exists()


def test_without_the_package_a_line_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from megatron_dppo.diagnostics.data import main; main(sys.argv[1:])"
    )
    words = ["generate", "acre", "--out", str(tmp_path / "x")]
    result = run_patiently([sys.executable, "-c", code, *words])
    assert result.returncode == 2
    assert "pip install 'megatron-dppo[reasoning-gym]'" in " ".join(result.stderr.split())
    assert find_reward("reasoning_gym").target == "megatron_dppo.rewards.reasoning_gym:score"
