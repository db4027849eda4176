"""Measure whole steps of a slice of Qwen3-30B-A3B, with a trainer and servers, beside the plan of the same runs.

The slice has the model's full width and vocabulary, but few layers, so that trainer and server fit on one GPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megatron_dppo import EXAMPLES
from megatron_dppo.cluster.planner.devices import Cluster, Device, gib
from megatron_dppo.cluster.planner.facts import facts_of
from megatron_dppo.cluster.planner.run_plan import RunPlan, device_here, plan_run
from megatron_dppo.config import load_config
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.demo.material import SHARED_GPU, WORDS, make_data, make_tokenizer
from megatron_dppo.diagnostics.gpu_check import Bench, CheckRow, part, random_model
from megatron_dppo.diagnostics.gpu_check.runs import (
    RECIPE,
    WITH_GRADIENTS,
    gradient_row,
    require_engine,
    steps_without_checkpoint,
)
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import Record

CONFIG = EXAMPLES / "model_configs" / "qwen3-30b-a3b" / "config.json"
_SMALL_MODEL = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 4096,
}
"""Sizes without a GPU. All widths are multiples of 128, the blocks of FP8 weights."""
STEPS = 3
"""Steps of a run. The first step is the warm-up, and the figures are means of the other steps."""
_BATCH = (
    "rollout.prompts_per_step=32",
    "rollout.group_size=8",
    "rollout.max_response_tokens=512",
    "training.prompts_per_mini_batch=16",
    "training.micro_batch_tokens=16384",
)
_SMALL_BATCH = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_response_tokens=16",
    "training.prompts_per_mini_batch=2",
    "training.micro_batch_tokens=1024",
)
_RUN = (
    "model.dtype=bfloat16",
    "optimizer.lr=1e-6",
    "evaluation.every=1000",
    "data.evaluation={}",
    "checkpoint.every=1000",
    "checkpoint.keep_responses=false",
    "run.steps=1000",
    *WITH_GRADIENTS,
)
FP8 = "engine.quantization=fp8"
R3 = "rollout.router_replay=true"


@dataclass(frozen=True)
class Variant:
    """A run of the slice.

    ``overrides``: how the run differs from the first run. ``needs_gpu``: whether it is left out without a GPU.
    """

    label: str
    overrides: tuple[str, ...] = ()
    needs_gpu: bool = False


VARIANTS = (
    Variant("bf16"),
    Variant("R3", (R3,)),
    Variant("FP8 rollouts", (FP8,)),
    Variant(
        "CUDA graphs off",
        ("sglang.cuda_graph_backend_decode=disabled", "sglang.cuda_graph_backend_prefill=disabled"),
        needs_gpu=True,
    ),
    Variant("no mask (pg-is)", ("algorithm.name=pg-is",)),
)
DEPTHS = {4: VARIANTS, 8: VARIANTS[:2]}
"""Layers of a slice -> its runs."""
_TIGHT = ("training.recompute=full", "sglang.mem_fraction_static=0.15")
"""Overrides for a depth that the GPU's memory does not hold without them."""


@part(
    "whole steps of a slice of Qwen3-30B-A3B against the plan: R3, FP8, CUDA graphs, masks", 900.0
)
def slice(bench: Bench) -> Iterator[CheckRow]:
    """Yield the rows of each run. A run that fails is a row, and the next run follows."""
    require_engine()
    if not bench.gpus:
        yield CheckRow("size", "scaled down without a GPU: 2 layers, hidden 256, 16 responses")
        yield from _depth_rows(bench, 2, VARIANTS, ())
        return
    for layers, variants in DEPTHS.items():
        yield from _depth_rows(bench, layers, variants, _TIGHT)


def _depth_rows(
    bench: Bench, layers: int, variants: Sequence[Variant], tight: Sequence[str]
) -> Iterator[CheckRow]:
    """Yield the rows of a slice of ``layers`` layers, with the overrides ``tight`` if the plan does not fit else."""
    material = make_material(bench, layers)
    base = slice_overrides(bench, material)
    device = device_here() if bench.gpus else None
    if device is not None:
        faults = planned(_config(bench, base), device, bench.gpus).too_large
        if faults:
            base = [*base, *tight]
            faults = planned(_config(bench, base), device, bench.gpus).too_large
        if faults:
            yield CheckRow(f"{layers} layers", f"not here: {faults[0]}")
            return
    first_figures: Mapping[str, float] | None = None
    for variant in variants:
        label = f"{layers} layers, {variant.label}"
        if variant.needs_gpu and not bench.gpus:
            yield CheckRow(label, "not here: it needs a GPU")
            continue
        directory = material / variant.label.replace(" ", "_")
        arguments = [*base, f"run.directory={directory}", *variant.overrides, *bench.overrides]
        try:
            records = steps_without_checkpoint(arguments, directory, STEPS)
        except RuntimeError as error:
            yield CheckRow(label, str(error), f"{STEPS} steps", False)
            continue
        yield gradient_row(f"{label}: gradient norm", records)
        figures = mean_figures(records)
        plan = None
        if device is not None:
            config = load_config(RECIPE, arguments)
            plan = planned(config, device, bench.gpus, figures["response_tokens"])
        yield from figure_rows(label, figures, first_figures, plan)
        first_figures = first_figures or figures
    # Do not leave gigabytes of random weights behind.
    shutil.rmtree(material / "checkpoint")


def _config(bench: Bench, overrides: Sequence[str]) -> TrainConfig:
    return load_config(RECIPE, [*overrides, *bench.overrides])


def make_material(bench: Bench, layers: int) -> Path:
    """Write the demo's problems and a random model of ``layers`` layers, and return their folder."""
    folder = bench.folder / f"{layers}_layers"
    config = json.loads(CONFIG.read_bytes()) | {"num_hidden_layers": layers}
    if not bench.gpus:
        config |= _SMALL_MODEL
    # The demo's tokenizer, with a word for each of the model's tokens.
    words = [*WORDS, *(f"word{number}" for number in range(len(WORDS), config["vocab_size"]))]
    tokenizer = make_tokenizer(words)
    config |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make_data(folder, seed=1)
    device = bench.device
    random_model(folder / "checkpoint", config, device=device, tokenizer=tokenizer)
    return folder


def slice_overrides(bench: Bench, material: Path) -> list[str]:
    """Return the overrides of the first run. With several GPUs, half of them train and each other GPU is a server."""
    ranks = max(1, bench.gpus // 2)
    overrides = [
        f"run.directory={material / 'run'}",
        f"model.hf_checkpoint={material / 'checkpoint' / 'model'}",
        f"data.train={material / 'train.jsonl'}",
        f"parallel.world_size={ranks}",
        f"parallel.expert={ranks}",
        f"engine.servers={max(1, bench.gpus - ranks)}",
        *_RUN,
        *(_BATCH if bench.gpus else _SMALL_BATCH),
    ]
    if bench.gpus == 1:
        overrides += SHARED_GPU
    return overrides


def planned(
    config: TrainConfig, device: Device, gpus: int, mean_response: float | None = None
) -> RunPlan:
    """Return the plan of a run on a node of ``gpus`` GPUs. ``mean_response``: tokens; None: of the longest response."""
    shape = config.model.read_shape()
    response = mean_response or config.rollout.max_response_tokens
    return plan_run(facts_of(config, shape, mean_response=response), Cluster(device, 1, gpus))


GENERATE, TRAIN, UPDATE, STEP = "generate", "train", "weight update", "step"


def mean_figures(records: Sequence[Record]) -> dict[str, float]:
    """Return the means over the steps after the warm-up: seconds by phase, rates, and tokens of a response."""
    steps = [record for record in records if (record["step"] or 0) > 1]

    def mean(name: str) -> float:
        return fmean(record.get(name) or 0.0 for record in steps)

    figures = {
        GENERATE: mean(metric_names.phase_seconds("generate")),
        TRAIN: mean(metric_names.phase_seconds("train")),
        UPDATE: mean(metric_names.UPDATE_SECONDS),
        "generated_tokens_per_s": mean(metric_names.TOKENS_PER_SECOND),
        "update_gb_per_s": mean("weights/gb_per_s"),
        "peak_memory_gib": mean("train/peak_memory_gib"),
        "response_tokens": mean("rollout/response_length"),
        "tokens": mean("rollout/tokens"),
        "gap": mean(metric_names.GAP_ON_POLICY),
    }
    seconds = 0.0
    for name in steps[0]:
        if metric_names.phase_of(name) is not None:
            seconds += mean(name)
    return {**figures, STEP: seconds}


def figure_rows(
    label: str,
    figures: Mapping[str, float],
    first: Mapping[str, float] | None,
    plan: RunPlan | None,
) -> Iterator[CheckRow]:
    """Yield a row for each phase and for the step: its seconds, beside the first run's seconds and the plan's."""
    details = {
        GENERATE: f", {figures['generated_tokens_per_s']:,.0f} tokens/s",
        TRAIN: f", {figures['tokens'] / figures[TRAIN]:,.0f} response tokens/s, "
        f"peak {figures['peak_memory_gib']:.1f} GiB",
        UPDATE: f", {figures['update_gb_per_s']:.3g} GB/s",
        STEP: f", mean |pi - mu| {figures['gap']:.1e}",
    }
    planned_seconds = {} if plan is None else plan_seconds(plan)
    for name, detail in details.items():
        row_figures = {"seconds": figures[name]}
        text = f"{figures[name]:.3g} s{detail}"
        if first is not None:
            row_figures["of_first_run"] = figures[name] / first[name]
            text += f"; {row_figures['of_first_run']:.3f} of the first run's seconds"
        expected = ""
        if planned_seconds.get(name):
            row_figures |= {
                "planned": planned_seconds[name],
                "ratio": figures[name] / planned_seconds[name],
            }
            expected = (
                f"{planned_seconds[name]:.3g} s by the plan, ratio {row_figures['ratio']:.2f}"
            )
        if name == STEP:
            row_figures |= figures
        yield CheckRow(f"{label}: {name}", text, expected, None, row_figures)
    if plan is not None:
        text = f"{gib(plan.fullest.total)} by the plan"
        yield CheckRow(f"{label}: a rank's GPU", f"{figures['peak_memory_gib']:.1f} GiB", text)


def plan_seconds(plan: RunPlan) -> dict[str, float]:
    """Return the planned seconds by the names of the measured phases; empty if the plan has no times."""
    seconds = plan.seconds
    if seconds is None:
        return {}
    training = seconds.recompute_pass + seconds.training + seconds.communication
    # The runs of a slice save no checkpoint.
    step = seconds.total - seconds.checkpoint
    return {GENERATE: seconds.servers, TRAIN: training, UPDATE: seconds.update, STEP: step}
