"""SGLang resolves every recipe's engine options for a faked H100 as in engine_options.yaml, which was reviewed."""

from __future__ import annotations

import difflib
import json
import sys
from typing import Any

import pytest
import yaml

from tests.gpu_evidence.engine_options import BASE, COLOCATED, EVERY, GOLDEN, MOVING, RECIPES, ROOT
from tests.patience import run_patiently

MODULE = "tests.gpu_evidence.engine_options"


@pytest.fixture(scope="module")
def now() -> str:
    answer = run_patiently([sys.executable, "-m", MODULE], cwd=ROOT)
    assert answer.returncode == 0, answer.stderr[-4000:]
    return answer.stdout


def test_it_is_as_written(now: str) -> None:
    written = GOLDEN.read_text()
    lines = difflib.unified_diff(
        written.splitlines(), now.splitlines(), "written", "now", lineterm=""
    )
    assert now == written, (
        "SGLang resolves otherwise than engine_options.yaml says; if so it shall be: "
        f"python -m {MODULE} --write\n" + "\n".join(lines)
    )


SIZES = {
    "qwen3_8b_base": 2,
    "qwen3_235b_a22b_r3": 8,
    "moonlight_16b_a3b_gsm8k": 2,
    "glm_4.7_flash_gsm8k": 4,
    "glm_4.5_air_gsm8k": 8,
    "qwen3_next_80b_a3b_gsm8k": 4,
    "qwen3_5_35b_a3b_gsm8k": 4,
    "gpt_oss_20b_gsm8k": 2,
}
"""Recipe -> tensor-parallel ranks of a server. Recipes of 30B-A3B have 4, and all others 1."""


def test_what_the_recipes_count_on(now: str) -> None:
    """The trainer and the planner rely on these options, so they must hold even if the golden file is written again."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(now)
    common = found.pop(EVERY)
    assert found.pop(COLOCATED) == {"enable_memory_saver": True}
    assert set(found) == {path.stem for path in RECIPES.glob("*.yaml")} - {BASE}
    for recipe, own in found.items():
        options = common | own
        moe = any(name in recipe for name in ("_a3b", "_a22b", "olmoe", "_moe_", "glm", "gpt_oss"))
        size = SIZES.get(recipe, 4 if "30b_a3b" in recipe else 1)
        assert options["attention_backend"] == "fa3"
        assert options["sampling_backend"] == "flashinfer"
        assert options["moe_runner_backend"] == ("triton" if moe else "auto")
        assert options["disable_overlap_schedule"] is False
        assert options["enable_return_routed_experts"] is any(
            name in recipe for name in ("_r3", "128k", "gsm8k")
        )
        assert options["tp_size"] == size
        assert options["dtype"] == "bfloat16"
        graphs = options["cuda_graph_config"]
        assert (graphs["decode"]["backend"], graphs["decode"]["max_bs"]) == (
            "full",
            512 if size >= 4 else 256,
        )
        assert (graphs["prefill"]["backend"], graphs["prefill"]["max_bs"]) == ("breakable", 8192)


def test_options_that_are_known_change_no_layout() -> None:
    """SGLang resolves each option for an H100. Only those of MOVING change the layout: updates read or refuse them."""
    answer = run_patiently([sys.executable, "-m", MODULE, "--layouts"], cwd=ROOT)
    assert answer.returncode == 0, answer.stderr[-4000:]
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    moved = {f"{name}={value}": found.pop(f"{name}={value}") for name, value in MOVING.items()}
    assert moved == {
        "attn_dp_size=2": {"attn_dp_size": 2, "enable_dp_attention": True},
        "moe_a2a_backend=deepep": {"moe_a2a_backend": "deepep", "ep_size": 4},
    }
    changed = {key: value for key, value in found.items() if isinstance(value, dict) and value}
    assert not changed
    assert sum(value == {} for value in found.values()) > len(found) * 0.9
