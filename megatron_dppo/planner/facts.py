"""The facts of a run that the formulas take, read off a checked configuration and its model once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.config.lora import updates_adapters
from megatron_dppo.config.schema import PolicyConfig, TrainConfig
from megatron_dppo.engine.options import ServerSections
from megatron_dppo.launch.placement import Roles
from megatron_dppo.model.errors import ModelConfigError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shape import ITEM_BYTES, OPTIMIZER_BYTES, ModelShape
from megatron_dppo.planner.devices import ceil_to
from megatron_dppo.planner.needs import Needs, needs_of
from megatron_dppo.planner.parameters import Trained

# The facts of a run that the formulas take, read off a checked configuration once.


@dataclass(frozen=True)
class TrainerJob:
    """The trainer's side. ``tokens``: of the longest micro-batch; a sequence longer than the budget has one to itself.
    ``micro_batches``: of one replica in one optimiser step. ``trained``: where not everything is.
    ``reference``: the weights that training started from are kept, ``reference_adapters``: adapters among them.
    ``gradient_bytes``, ``optimizer_bytes``: of each
    trained parameter, of its gradient and its optimizer state."""

    shape: ModelShape
    layout: Layout
    sequence_parallel: bool
    dtype: str
    recompute: str
    distributed: bool
    tokens: int
    micro_batches: int
    transformer_engine: bool = True
    trained: Trained | None = None
    reference: bool = False
    reference_adapters: bool = False
    gradient_bytes: int = 4
    optimizer_bytes: int = 12

    @property
    def item_bytes(self) -> int:
        """Bytes of a weight and of an activation."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class RolloutJob:
    """The data of one step. Lengths in tokens: ``longest_*`` are limits, ``mean_response`` an assumption or a
    measurement. ``steps``: optimiser steps in a rollout batch."""

    prompts: int
    group_size: int
    longest_prompt: int
    longest_response: int
    mean_prompt: float
    mean_response: float
    steps: int
    topk: int
    routing: bool
    recompute_pass: bool
    staleness: int
    max_concurrent: int

    @property
    def responses(self) -> int:
        """Sequences of a rollout batch."""
        return self.prompts * self.group_size

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence, prompt and response."""
        return self.mean_prompt + self.mean_response

    @property
    def tokens(self) -> float:
        """Tokens of a rollout batch, prompts counted with every response."""
        return self.responses * self.mean_length

    @property
    def response_tokens(self) -> float:
        """Sampled tokens of a rollout batch."""
        return self.responses * self.mean_response


@dataclass(frozen=True)
class EngineJob:
    """The servers that the run starts. ``memory_fraction``: SGLang's ``mem_fraction_static``, None as it chooses."""

    servers: int
    tensor: int
    expert: int
    pipeline: int
    memory_fraction: float | None
    max_running: int | None
    chunked_prefill: int | None
    kv_bytes: int

    @property
    def gpus(self) -> int:
        """GPUs of one server."""
        return self.tensor * self.pipeline


EVALUATION_PROBLEMS = 30
"""Of a held-out set whose file is not here, as in AIME. Assumption."""


@dataclass(frozen=True)
class EvaluationJob:
    """``problems`` of all held-out sets, ``samples`` of each, every ``every`` steps."""

    problems: int
    samples: int
    longest_response: int
    every: int


@dataclass(frozen=True)
class Job:
    """A whole run. ``not_counted``: settings of the libraries that change memory or time and that no formula reads.

    ``ranks_per_sender``: ranks of a node, of which one sends weights; 1: every holder sends. ``updates_adapters``:
    whether weight updates send adapters alone.
    """

    trainer: TrainerJob
    rollout: RolloutJob
    engine: EngineJob
    roles: Roles
    bucket_bytes: int
    checkpoint_every: int
    checkpoint_background: bool
    not_counted: tuple[str, ...] = ()
    ranks_per_sender: int = 1
    updates_adapters: bool = False
    evaluation: EvaluationJob | None = None

    @property
    def senders(self) -> int:
        """Trainer ranks that send weights, each in a group with all engine ranks."""
        return senders(self.trainer.layout, self.ranks_per_sender)


def senders(layout: Layout, ranks_per_sender: int = 1) -> int:
    """Trainer ranks that send weights: the first holder of each shard of the experts, or of each stage where they are
    not spread; of those, one in each run of ``ranks_per_sender`` ranks (``weight_sync/strategies/distributed.py``,
    ``model.gather_plan.node_receivers``)."""
    holders = (
        stage * layout.stage_ranks + expert * layout.expert_tensor
        for stage in range(layout.pipeline)
        for expert in range(layout.expert)
    )
    return len({rank // ranks_per_sender for rank in holders})


def trainer_job(
    config: PolicyConfig, shape: ModelShape, micro_batches: int, longest: int, *, gpu: bool = True
) -> TrainerJob:
    """``longest``: tokens of the longest sequence. ``gpu``: Transformer Engine's layers, else torch's."""
    sizes, item = config.parallel.sizes, ITEM_BYTES[config.model.dtype]
    sequence_parallel = sizes.sequence_parallel(shape)
    tokens = max(config.training.micro_batch_tokens, longest)
    return TrainerJob(
        shape=shape,
        layout=Layout.of(sizes),
        sequence_parallel=sequence_parallel,
        dtype=config.model.dtype,
        recompute=config.training.recompute,
        distributed=config.distributed_optimizer,
        tokens=ceil_to(tokens, (sizes.tensor if sequence_parallel else 1) * config.token_multiple),
        micro_batches=micro_batches,
        transformer_engine=gpu,
        trained=Trained.of(config.lora, shape),
        reference=config.keeps_reference,
        reference_adapters=config.keeps_reference and config.lora.start_from is not None,
        gradient_bytes=4 if config.megatron_ddp.get("grad_reduce_in_fp32", True) else item,
        optimizer_bytes=OPTIMIZER_BYTES[config.model.dtype],
    )


def job_of(
    config: TrainConfig,
    shape: ModelShape,
    *,
    mean_response: float | None = None,
    mean_prompt: float | None = None,
    gpu: bool = True,
    ranks_per_node: int = 8,
) -> Job:
    """The facts of ``config``, whose layout must have passed its checks.

    ``mean_response``, ``mean_prompt``: tokens; by default half of the longest response and a quarter of the longest
    prompt.
    """
    needs = needs_of(config, shape.vocab_size)
    rollout = _rollout_job(config, needs, mean_response, mean_prompt)
    longest = rollout.longest_prompt + rollout.longest_response
    per_step = config.training.prompts_per_mini_batch * rollout.group_size
    share = -(-per_step // max(1, config.parallel.data))
    budget = max(config.training.micro_batch_tokens, longest)
    micro_batches = max(1, round(share * rollout.mean_length / (budget * PACKING)))
    return Job(
        trainer_job(config, shape, micro_batches, longest, gpu=gpu),
        rollout,
        _engine_job(config),
        Roles.of(config.parallel.world_size, ServerSections.where_generated(config)),
        config.weight_sync.bucket_mib * 2**20,
        config.checkpoint.every,
        config.checkpoint.background,
        (
            *(f"megatron.{key}" for key in config.megatron if key not in _READ_MEGATRON),
            *(f"megatron_ddp.{key}" for key in config.megatron_ddp if key != "grad_reduce_in_fp32"),
            *_unread(config.sglang),
        ),
        1 if config.weight_sync.senders == "holders" else ranks_per_node,
        updates_adapters(config.lora),
        _evaluation_job(config),
    )


def _evaluation_job(config: TrainConfig) -> EvaluationJob | None:
    sets, asked = config.data.evaluation_files, config.evaluation
    if not sets:
        return None
    longest = asked.max_response_tokens or config.rollout.max_response_tokens
    problems = sum(_problems(Path(file.path)) for file in sets.values())
    return EvaluationJob(problems, asked.samples_per_prompt, longest, asked.every)


def _problems(path: Path) -> int:
    if path.suffix != ".jsonl" or not path.is_file():
        return EVALUATION_PROBLEMS
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


PACKING = 0.9
"""Share of a micro-batch's token budget that sequences fill. Assumption: whole sequences of many lengths."""


def _rollout_job(
    config: TrainConfig, needs: Needs, mean_response: float | None, mean_prompt: float | None
) -> RolloutJob:
    rollout, longest_prompt = config.rollout, config.data.max_prompt_tokens
    return RolloutJob(
        prompts=rollout.prompts_per_step,
        group_size=rollout.group_size,
        longest_prompt=longest_prompt,
        longest_response=rollout.max_response_tokens,
        mean_prompt=longest_prompt / 4 if mean_prompt is None else mean_prompt,
        mean_response=rollout.max_response_tokens / 2 if mean_response is None else mean_response,
        steps=rollout.prompts_per_step // config.training.prompts_per_mini_batch,
        topk=needs.topk,
        routing=rollout.router_replay,
        recompute_pass=needs.recompute_pass,
        staleness=rollout.max_staleness,
        max_concurrent=rollout.max_concurrent_requests,
    )


def _engine_job(config: TrainConfig) -> EngineJob:
    table = config.sglang
    fraction = table.get("mem_fraction_static")
    return EngineJob(
        servers=config.engine.started if config.rollout.replay_from is None else 0,
        tensor=_size(table, "tp_size", 1),
        expert=_size(table, "ep_size", 1),
        pipeline=_size(table, "pp_size", 1),
        memory_fraction=None if fraction is None else float(fraction),
        max_running=table.get("max_running_requests"),
        chunked_prefill=table.get("chunked_prefill_size"),
        kv_bytes=1 if str(table.get("kv_cache_dtype", "auto")).startswith("fp8") else 2,
    )


_READ_MEGATRON = ("fp8", "fp8_recipe")
_READ = ("tp_size", "ep_size", "pp_size", "mem_fraction_static", "max_running_requests", "chunked_prefill_size",
         "kv_cache_dtype", "base_gpu_id")  # fmt: skip


def _unread(table: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"sglang.{key}" for key in table if key not in _READ)


def _size(table: dict[str, Any], key: str, default: int) -> int:
    return int(table.get(key) or default)


# Batch arithmetic: sequences, tokens and micro-batches of a step, of an optimiser step, of a
# rank.


@dataclass(frozen=True)
class Batches:
    """``per_step``: responses in an optimiser step; ``replica``: of them, on one data-parallel replica. Tokens at the
    mean lengths; ``longest_tokens``: of a batch in which every sequence reaches both limits."""

    responses: int
    tokens: float
    longest_tokens: int
    optimizer_steps: int
    per_step: int
    replica: float
    micro_batches: int
    micro_batch_tokens: int
    per_leader: float


def batches(job: Job) -> Batches:
    """responses = prompts x group; an optimiser step takes responses / steps, a replica that / DP; micro-batches =
    replica's tokens / (micro-batch tokens x PACKING), at least 1; leaders (one a replica) generate responses / DP."""
    rollout, data = job.rollout, job.trainer.layout.data
    per_step = rollout.responses // rollout.steps
    return Batches(
        responses=rollout.responses,
        tokens=rollout.tokens,
        longest_tokens=rollout.responses * (rollout.longest_prompt + rollout.longest_response),
        optimizer_steps=rollout.steps,
        per_step=per_step,
        replica=per_step / data,
        micro_batches=job.trainer.micro_batches,
        micro_batch_tokens=job.trainer.tokens,
        per_leader=rollout.responses / data,
    )


# The model of a recipe: its checkpoint's config.json, or, before it is downloaded, one that is
# kept by its name.


def shape_of(checkpoint: str, known: str | Path) -> ModelShape:
    """Of ``checkpoint/config.json``; where that is missing, of ``known/<its name in small letters>/config.json``.

    Raises ModelConfigError where neither is there, UnsupportedModelError for a model outside the tables.
    """
    folder = Path(checkpoint)
    if (folder / "config.json").is_file():
        return load_model_shape(folder)
    kept = Path(known) / folder.name.lower()
    if (kept / "config.json").is_file():
        return load_model_shape(kept)
    raise ModelConfigError(
        f"model.hf_checkpoint: no config.json in {folder} nor in {kept}, expected one of them"
    )
