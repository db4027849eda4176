"""The recipes: they load, they have the paper's numbers, and their layouts fit their models."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from examples.recipes import paper, verdicts
from megatron_dppo.cluster import plan
from megatron_dppo.cluster.planner import facts
from megatron_dppo.config import SupervisedConfig, check_config, load_as, load_config
from megatron_dppo.config.layout import describe
from megatron_dppo.rewards import find_reward

ROOT = Path(__file__).resolve().parents[3]
RECIPES = ROOT / "examples" / "recipes"
OURS = {
    # model, optimiser steps of a rollout batch
    "qwen3_30b_a3b_r3": ("qwen3-30b-a3b", 8),
    "qwen3_30b_a3b_async": ("qwen3-30b-a3b", 8),
    "qwen3_30b_a3b_r3_async": ("qwen3-30b-a3b", 8),
    "qwen3_30b_a3b_base_32k": ("qwen3-30b-a3b-base", 4),
    "qwen3_30b_a3b_128k": ("qwen3-30b-a3b-thinking-2507", 2),
    "qwen3_235b_a22b_r3": ("qwen3-235b-a22b", 8),
    "olmoe_1b_7b_gsm8k": ("olmoe-1b-7b-0924-instruct", 4),
    "qwen1.5_moe_a2.7b_gsm8k": ("qwen1.5-moe-a2.7b", 4),
    "moonlight_16b_a3b_gsm8k": ("moonlight-16b-a3b-instruct", 4),
    "glm_4.7_flash_gsm8k": ("glm-4.7-flash", 4),
    "glm_4.5_air_gsm8k": ("glm-4.5-air", 4),
    "qwen3_next_80b_a3b_gsm8k": ("qwen3-next-80b-a3b-instruct", 4),
    "qwen3_5_35b_a3b_gsm8k": ("qwen3.5-35b-a3b", 4),
    "gpt_oss_20b_gsm8k": ("gpt-oss-20b", 4),
    "qwen3_30b_a3b_base_taught": ("qwen3-30b-a3b-base", 8),
    "qwen3_1.7b_base_taught": ("qwen3-1.7b-base", 4),
}
PAPER = {
    "qwen3_30b_a3b_base": ("qwen3-30b-a3b-base", 8),
    "qwen3_30b_a3b_base_r3": ("qwen3-30b-a3b-base", 8),
    "qwen3_30b_a3b_base_lora": ("qwen3-30b-a3b-base", 8),
    "qwen3_30b_a3b_base_8k": ("qwen3-30b-a3b-base", 8),
    "qwen3_30b_a3b": ("qwen3-30b-a3b", 8),
    "qwen3_8b_base": ("qwen3-8b-base", 4),
    "r1_distill_qwen_1.5b_stability": ("deepseek-r1-distill-qwen-1.5b", 4),
    "qwen3_1.7b_base_efficiency": ("qwen3-1.7b-base", 4),
    "qwen3_4b_base": ("qwen3-4b-base", 4),
    "octothinker_3b": ("octothinker-3b-hybrid-base", 8),
    "qwen3_1.7b_base_arc_1d": ("qwen3-1.7b-base", 2),
    "qwen3_1.7b_base_acre": ("qwen3-1.7b-base", 2),
    "qwen3_1.7b_base_sudoku": ("qwen3-1.7b-base", 2),
    "qwen3_4b_instruct_rlhf": ("qwen3-4b-instruct-2507", 4),
    "qwen3_4b_instruct_hh_rlhf": ("qwen3-4b-instruct-2507", 4),
}
"""The recipes of the paper's experiments. test_paper.py compares their numbers with examples/paper.yaml."""
STEPS = PAPER | OURS


SUPERVISED = RECIPES / "supervised" / "qwen3_30b_a3b_base_cold_start.yaml"


def test_every_recipe_is_in_the_table():
    assert {p.stem for p in RECIPES.glob("*.yaml")} - {"scaling"} == set(STEPS)


def test_the_supervised_recipe_loads_and_fits_the_nodes_that_it_names(capsys):
    config = load_as(SupervisedConfig, SUPERVISED)
    assert plan.main([str(SUPERVISED), "--gpu", "h100", "--nodes", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    batches = found["plan"]["batches"]
    assert batches["responses"] == config.training.sequences_per_step
    assert batches["optimizer_steps"] == 1
    assert batches["longest_tokens"] == 128 * 16384
    # Four replicas of 32 sequences of 8,192 tokens on average fill 16 micro-batches, and each is filled in part.
    assert batches["micro_batches"] == round(32 * 8192 / (16384 * facts.PACKING))
    assert found["plan"]["engine"] is None


def test_every_recipe_of_the_paper_is_an_experiments():
    assert {row["recipe"] for row in paper.experiments().values()} - {None} == set(PAPER)


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_of_the_paper_samples_unchanged_and_trains_in_bfloat16(name):
    config = load_config(RECIPES / f"{name}.yaml")
    assert (config.rollout.temperature, config.rollout.top_p) == (1.0, 1.0)
    assert config.model.dtype == "bfloat16"


def model_folder(folder, model):
    """Return the checkpoint's folder of a model in examples/model_configs, with empty weights and tokenizer."""
    checkpoint = folder / model
    shutil.copytree(ROOT / "examples" / "model_configs" / model, checkpoint)
    for file in ("model.safetensors", "tokenizer.json"):  # no check reads these files
        (checkpoint / file).touch()
    return checkpoint


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("algorithm", ["grpo-clip-higher", "dppo-topk-kl"])
def test_the_recipe_passes_every_check_with_any_algorithm(name, algorithm, tmp_path):
    checkpoint = model_folder(tmp_path, STEPS[name][0])
    data = tmp_path / "data.jsonl"
    data.touch()
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    assert recipe["run"]["directory"].startswith("runs/")
    teachers = []
    for teacher in recipe.get("distillation", {}).get("teachers", {}):
        folder = model_folder(tmp_path, teacher)
        teachers.append(f"distillation.teachers.{teacher}.hf_checkpoint={folder}")
    config = load_config(
        RECIPES / f"{name}.yaml",
        [
            "engine.device=cuda",
            f"algorithm.name={algorithm}",
            "algorithm.options={}",  # a recipe may set a threshold of its own algorithm
            f"model.hf_checkpoint={checkpoint}",
            f"data.train={data}",
            f"data.evaluation={{held_out: {data}}}",
            *teachers,
        ],
    )
    layout = describe(config, check_config(config, name))
    assert layout.endswith(f" and {STEPS[name][1]} optimiser steps")


@pytest.mark.parametrize("name", STEPS)
def test_the_rewards_of_a_recipe_take_its_options(name):
    for term in load_config(RECIPES / f"{name}.yaml").reward.terms.values():
        # A reward model loads its tokenizer, which is not here.
        if term.name != "reward_model":
            assert find_reward(term.name).bind(term.options)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("gpu", verdicts.GPUS)
def test_the_recipe_fits_the_hardware_that_it_names(name, gpu):
    found = verdicts.plans(name)[gpu]
    assert found.faults == ()
    assert all(node.idle == 0 for node in found.nodes)


def test_the_published_verdicts_are_the_planners():
    readme = (RECIPES / "README.md").read_text()
    assert verdicts.updated_page(readme) == readme
    assert set(verdicts.NODES) == set(STEPS)
