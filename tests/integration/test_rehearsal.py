"""A whole rehearsal on two ranks, of a user's own recipe, from its files to the verdict."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.runs import ROOT
from tests.patience import run_patiently
from tests.unit.repository.test_recipes import RECIPES, SUPERVISED

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

REWARD = """
def shaped(response: str, answer: str, source: str) -> float:
    return float(source == "own" and bool(response))
"""


def recipe(folder: Path, **sections) -> Path:
    """A recipe with its own data and reward, for a mixture of experts of a size that no recipe has."""
    (folder / "rehearsed_reward.py").write_text(REWARD)
    rows = [
        {"question": f"Add {i} and {i}.", "solution": f"{2 * i}", "extra_info": {"source": "own"}}
        for i in range(100)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("train", "held"):
        (folder / f"{name}.jsonl").write_text(lines)
    tree: dict[str, Any] = {
        "run": {"directory": str(folder / "real"), "steps": 100},
        "model": {"hf_checkpoint": "checkpoints/Qwen3-30B-A3B-Base"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "evaluation": {"held": str(folder / "held.jsonl")},
            "prompt_template": "Solve this. {prompt}",
        },
        "rollout": {
            "prompts_per_step": 64,
            "group_size": 8,
            "max_response_tokens": 512,
            "router_replay": True,
        },
        "reward": {"name": "rehearsed_reward:shaped"},
        "parallel": {"world_size": 2, "expert": 2},
        "training": {"prompts_per_mini_batch": 16, "micro_batch_tokens": 8192},
        "optimizer": {"lr": 1e-6},
        "sglang": {"tp_size": 4, "mem_fraction_static": 0.8},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def rehearse(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_dppo.cluster.rehearsal", *words]
    variables = {"PYTHONPATH": f"{ROOT}:{folder}"}
    return run_patiently(
        [*command, f"--directory={folder / 'rehearsal'}"],
        cwd=folder,
        env={**os.environ, **variables},
    )


def test_a_recipe_of_ones_own_passes(tmp_path):
    completed = rehearse(tmp_path, str(recipe(tmp_path)))
    assert completed.returncode == 0, completed.stdout[-5000:] + completed.stderr[-3000:]
    report = json.loads((tmp_path / "rehearsal" / "rehearsal.json").read_text())
    assert report["passed"]
    assert report["ranks"] == 2
    missed = [row for row in report["findings"] if row["holds"] is False]
    assert missed == []
    assert {"resume", "train after resume"} & set(report["phases"])
    assert "sglang.tp_size" in {row["key"] for row in report["not_exercised"]}
    assert not (tmp_path / "real").exists()


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"reward": {"name": "rehearsed_reward:gone"}}, "reward.name"),
        ({"environment": {"name": "nowhere:Class"}}, "environment.name"),
        ({"sglang": {"attention_backend": "no-such-kernel"}}, "sglang.attention_backend"),
        ({"megatron": {"no_such_field": 1}}, "megatron.no_such_field"),
    ],
)
def test_a_fault_of_the_recipe_is_named_by_its_key(sections, key, tmp_path):
    completed = rehearse(tmp_path, str(recipe(tmp_path, **sections)))
    assert completed.returncode in (1, 2)
    assert "FAILED" in completed.stderr
    assert key in completed.stderr.partition("FAILED")[2]


@pytest.mark.parametrize(
    "words",
    [("olmoe_1b_7b_gsm8k",), ("qwen3_30b_a3b_base_r3", "--ranks=2")],
    ids=["EP2", "TP2 EP2"],
)
def test_a_recipe_passes(words, tmp_path):
    name, *options = words
    completed = rehearse(tmp_path, str(RECIPES / f"{name}.yaml"), *options)
    assert completed.returncode == 0, completed.stdout[-5000:] + completed.stderr[-3000:]
    report = json.loads((tmp_path / "rehearsal" / "rehearsal.json").read_text())
    assert report["passed"]
    measured = {row["label"]: row["holds"] for row in report["findings"]}
    assert measured["gradient norm"]


def test_a_supervised_recipe_passes(tmp_path):
    """Two ranks with the recipe's experts in parallel, on conversations of the user's own file."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Add {i}."},
                {"role": "assistant", "content": f"{2 * i}"},
            ]
        }
        for i in range(80)
    ]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    completed = rehearse(tmp_path, str(SUPERVISED), "--ranks=2", f"data.train={data}")
    assert completed.returncode == 0, completed.stdout[-5000:] + completed.stderr[-3000:]
    report = json.loads((tmp_path / "rehearsal" / "rehearsal.json").read_text())
    assert report["passed"]
    assert report["ranks"] == 2
    assert all(row["holds"] is not False for row in report["findings"])
    missing = {row["key"] for row in report["not_exercised"]}
    assert "data.evaluation.held_out" in missing
    assert "data.train" not in missing
