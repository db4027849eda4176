"""The planner's verdict on every recipe, on the hardware that it is written for: the table in README.md.

python -m examples.recipes.verdicts            # print the table
python -m examples.recipes.verdicts --write    # put the table into README.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_dppo.cluster.known_models import read_model
from megatron_dppo.cluster.planner.devices import DEVICES, Cluster
from megatron_dppo.cluster.planner.facts import facts_of
from megatron_dppo.cluster.planner.run_plan import RunPlan, plan_run
from megatron_dppo.config import load_config

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent / "model_configs"
NODES = {
    "qwen3_30b_a3b_base": 4,
    "qwen3_30b_a3b_base_r3": 4,
    "qwen3_30b_a3b_base_lora": 4,
    "qwen3_30b_a3b_base_8k": 4,
    "qwen3_30b_a3b": 4,
    "qwen3_30b_a3b_r3": 4,
    "qwen3_30b_a3b_async": 4,
    "qwen3_30b_a3b_r3_async": 4,
    "qwen3_30b_a3b_base_32k": 4,
    "qwen3_30b_a3b_128k": 8,
    "qwen3_235b_a22b_r3": 8,
    "qwen3_8b_base": 2,
    "r1_distill_qwen_1.5b_stability": 1,
    "qwen3_1.7b_base_efficiency": 1,
    "qwen3_4b_base": 1,
    "octothinker_3b": 1,
    "qwen3_1.7b_base_arc_1d": 1,
    "qwen3_1.7b_base_acre": 1,
    "qwen3_1.7b_base_sudoku": 1,
    "qwen3_4b_instruct_rlhf": 1,
    "qwen3_4b_instruct_hh_rlhf": 1,
    "olmoe_1b_7b_gsm8k": 1,
    "qwen1.5_moe_a2.7b_gsm8k": 2,
    "moonlight_16b_a3b_gsm8k": 2,
    "glm_4.7_flash_gsm8k": 4,
    "glm_4.5_air_gsm8k": 6,
    "qwen3_next_80b_a3b_gsm8k": 6,
    "qwen3_5_35b_a3b_gsm8k": 4,
    "gpt_oss_20b_gsm8k": 2,
    "qwen3_30b_a3b_base_taught": 5,
    "qwen3_1.7b_base_taught": 1,
}
"""Recipe -> number of nodes."""
GPUS_PER_NODE = {"olmoe_1b_7b_gsm8k": 4}
"""Recipe -> number of GPUs of a node, if it is not eight."""
GPUS = ("h100", "a100", "h200", "b200")
BEGIN, END = "<!-- verdicts -->", "<!-- end of verdicts -->"


def plans(recipe: str) -> dict[str, RunPlan]:
    """Return the recipe's plan on each type of GPU."""
    config = load_config(HERE / f"{recipe}.yaml")
    facts = facts_of(config, read_model(config.model.hf_checkpoint, MODELS).shape)
    found = {}
    for gpu in GPUS:
        cluster = Cluster(DEVICES[gpu], NODES[recipe], gpus_per_node(recipe))
        found[gpu] = plan_run(facts, cluster)
    return found


def gpus_per_node(recipe: str) -> int:
    """Return the number of GPUs of each node that the recipe is written for."""
    return GPUS_PER_NODE.get(recipe, 8)


def table() -> str:
    """Return the table as Markdown."""
    head = [
        "recipe",
        "nodes",
        "trainer",
        "servers",
        *(f"{gpu.upper()}: GPU memory; sequences; step; tokens/s a GPU" for gpu in GPUS),
    ]
    rows = [head, ["---"] * len(head), *(_row(recipe) for recipe in NODES)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(recipe: str) -> list[str]:
    plan_by_gpu = plans(recipe)
    # The facts of the recipe do not depend on the GPU.
    facts = plan_by_gpu["h100"].facts
    ranks = f"{facts.trainer.layout.world_size}: {facts.trainer.layout.describe()}"
    servers = f"{facts.engine.started} x TP{facts.engine.layout.tensor}"
    cells = [_cell(plan) for plan in plan_by_gpu.values()]
    return [f"`{recipe}`", f"{NODES[recipe]} x {gpus_per_node(recipe)}", ranks, servers, *cells]


def _cell(plan: RunPlan) -> str:
    if not plan.fits or plan.seconds is None or plan.engine is None:
        return "does not fit"
    memory_share = plan.fullest.total / plan.cluster.device.memory
    seconds = plan.seconds.total
    rate = plan.facts.rollout.tokens / seconds / plan.cluster.gpus
    return f"{memory_share:.0%}; {plan.engine.sequences}; {seconds:,.0f} s; {rate:,.0f}"


def updated_page(text: str) -> str:
    """Return README.md, ``text``, with the present table."""
    return with_table(text, BEGIN, END, table())


def with_table(page: str, begin: str, end: str, table_text: str) -> str:
    """Return ``page`` with ``table_text`` between the lines ``begin`` and ``end``.

    Raises ValueError if ``page`` lacks one of the lines.
    """
    before, _, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_end:
        raise ValueError(
            f"the page has no {begin} with {end} after it, expected both around the table"
        )
    return f"{before}{begin}\n{table_text}\n{end}{after}"


def main() -> int:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    readme = HERE / "README.md"
    if parser.parse_args().write:
        readme.write_text(updated_page(readme.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
