"""The recipes: they load, they have the paper's numbers, and their layouts fit their models."""

import shutil
from pathlib import Path

import pytest
import yaml

from examples.recipes import verdicts
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.config import check_config, load_config

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "examples" / "recipes"
TABLE = {
    # model, response length, prompts a batch, prompts an optimiser step, group, lr, TV, cap, every, R3
    "qwen3_30b_a3b_base": ("qwen3-30b-a3b-base", 16384, 256, 32, 16, 1e-6, 0.2, 5.0, 5, False),
    "qwen3_30b_a3b_base_r3": ("qwen3-30b-a3b-base", 16384, 256, 32, 16, 1e-6, 0.2, 5.0, 5, True),
    "qwen3_30b_a3b_base_lora": ("qwen3-30b-a3b-base", 8000, 128, 16, 8, 1e-5, 0.15, 5.0, 10, False),
    "qwen3_30b_a3b": ("qwen3-30b-a3b", 16384, 256, 32, 16, 1e-6, 0.2, 5.0, 5, False),
    "qwen3_30b_a3b_r3": ("qwen3-30b-a3b", 16384, 256, 32, 16, 1e-6, 0.2, 5.0, 5, True),
    "qwen3_8b_base": ("qwen3-8b-base", 8000, 128, 32, 8, 1e-6, 0.2, 5.0, 10, False),
}
"""arXiv 2602.04879 v2, the appendix's table of hyper-parameters."""
STUDY = {
    "r1_distill_qwen_1.5b_stability": (
        "deepseek-r1-distill-qwen-1.5b", 8000, 64, 16, 8, 1e-6, 0.15, float("inf"), 20, False,
    ),
}  # fmt: skip
"""The paper's text on the stability study. The interval of evaluations is this project's choice."""
QWEN3_1_7B = ("qwen3-1.7b-base", 8000, 128, 32, 8, 1e-6, 0.15, float("inf"), 10, False)
FOLLOWING = {
    "qwen3_1.7b_base_efficiency": QWEN3_1_7B,
    "octothinker_3b": ("octothinker-3b", 8000, 128, 32, 8, 1e-6, 0.2, 5.0, 10, False),
    "qwen3_1.7b_base_arc_1d": QWEN3_1_7B,
    "qwen3_1.7b_base_acre": QWEN3_1_7B,
    "qwen3_1.7b_base_sudoku": QWEN3_1_7B,
}
"""The paper names model and data of these runs, and the bounds of the efficiency study's baseline. The numbers are this
project's choice: those of TABLE's Dense Base, and for Qwen3-1.7B-Base the thresholds of the stability study."""
PAPER = TABLE | STUDY | FOLLOWING
OURS = {
    # model, optimiser steps of a rollout batch
    "qwen3_30b_a3b_async": ("qwen3-30b-a3b", 8),
    "qwen3_30b_a3b_r3_async": ("qwen3-30b-a3b", 8),
    "qwen3_30b_a3b_base_32k": ("qwen3-30b-a3b-base", 4),
    "qwen3_30b_a3b_128k": ("qwen3-30b-a3b-thinking-2507", 2),
    "qwen3_235b_a22b_r3": ("qwen3-235b-a22b", 8),
    "qwen3_4b_instruct_rlhf": ("qwen3-4b-instruct-2507", 4),
    "olmoe_1b_7b_gsm8k": ("olmoe-1b-7b-0924-instruct", 4),
    "qwen1.5_moe_a2.7b_gsm8k": ("qwen1.5-moe-a2.7b", 4),
    "moonlight_16b_a3b_gsm8k": ("moonlight-16b-a3b-instruct", 4),
    "glm_4.7_flash_gsm8k": ("glm-4.7-flash", 4),
    "glm_4.5_air_gsm8k": ("glm-4.5-air", 4),
    "qwen3_next_80b_a3b_gsm8k": ("qwen3-next-80b-a3b-instruct", 4),
    "qwen3_5_35b_a3b_gsm8k": ("qwen3.5-35b-a3b", 4),
    "gpt_oss_20b_gsm8k": ("gpt-oss-20b", 4),
}
STEPS = {name: (row[0], row[2] // row[3]) for name, row in PAPER.items()} | OURS


def test_every_recipe_is_in_the_table():
    assert {p.stem for p in RECIPES.glob("*.yaml")} - {"scaling"} == set(STEPS)


@pytest.mark.parametrize("name", PAPER)
def test_the_recipe_says_what_the_paper_says(name):
    config = load_config(RECIPES / f"{name}.yaml")
    rollout, algorithm = config.rollout, config.algorithm
    numbers = build_algorithm(algorithm.name, algorithm.options, algorithm.settings).numbers
    found = (
        rollout.max_response_tokens,
        rollout.prompts_per_step,
        config.training.prompts_per_mini_batch,
        rollout.group_size,
        config.optimizer.lr,
        numbers["tv_threshold"],
        numbers["ratio_cap"],
        config.evaluation.every,
        rollout.router_replay,
    )
    assert found == PAPER[name][1:]
    assert (rollout.temperature, rollout.top_p, config.data.max_prompt_tokens) == (1.0, 1.0, 1024)
    evaluation = config.evaluation
    sampling = (evaluation.samples_per_prompt, evaluation.temperature, evaluation.top_p)
    assert sampling == (32, 0.7, 0.95)
    assert config.model.dtype == "bfloat16"


@pytest.mark.parametrize("name", FOLLOWING)
def test_what_is_not_published_follows_dense_base(name):
    numbers, dense = FOLLOWING[name], TABLE["qwen3_8b_base"]
    study = STUDY["r1_distill_qwen_1.5b_stability"]
    thresholds = (6, 7) if name.startswith("qwen3_1.7b") else ()
    for index in range(1, len(dense)):
        source = study if index in thresholds else dense
        assert numbers[index] == source[index]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("algorithm", ["grpo-clip-higher", "dppo-topk-kl"])
def test_the_recipe_passes_every_check_with_any_algorithm(name, algorithm, tmp_path):
    checkpoint = tmp_path / "model"
    shutil.copytree(ROOT / "examples" / "model_configs" / STEPS[name][0], checkpoint)
    for file in ("model.safetensors", "tokenizer.json"):  # no check reads these files
        (checkpoint / file).touch()
    data = tmp_path / "data.jsonl"
    data.touch()
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    assert recipe["run"]["directory"].startswith("runs/")
    config = load_config(
        RECIPES / f"{name}.yaml",
        [
            f"algorithm.name={algorithm}",
            "algorithm.options={}",  # a recipe may set a threshold of its own algorithm
            f"model.hf_checkpoint={checkpoint}",
            f"data.train={data}",
            f"data.evaluation={{held_out: {data}}}",
        ],
    )
    layout = check_config(config, name)
    assert layout.endswith(f" and {STEPS[name][1]} optimiser steps")


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("gpu", verdicts.GPUS)
def test_the_recipe_fits_the_hardware_that_it_names(name, gpu):
    plan = verdicts.plans(name)[gpu]
    assert plan.faults == ()
    assert all(node.idle == 0 for node in plan.nodes)


def test_the_published_verdicts_are_the_planners():
    readme = (RECIPES / "README.md").read_text()
    assert verdicts.updated_page(readme) == readme
    assert set(verdicts.NODES) == set(STEPS)


def test_the_efficiency_studys_baseline_has_its_published_bounds():
    config = load_config(
        RECIPES / "qwen3_1.7b_base_efficiency.yaml", ["algorithm.name=grpo-clip-higher"]
    )
    algorithm = config.algorithm
    numbers = build_algorithm(algorithm.name, algorithm.options, algorithm.settings).numbers
    assert (numbers["clip_low"], numbers["clip_high"]) == (0.2, 0.28)
