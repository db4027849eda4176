"""Collect the facts of a run that the formulas need, and count the parameters of a trainer rank.

The facts are read once from a checked configuration and its model. All parameters and the trained parameters are
counted from the tables of the model family, without allocating tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

from megatron_dppo.cluster.known_models import read_model
from megatron_dppo.config import ConfigError
from megatron_dppo.config.data_files import data_files
from megatron_dppo.config.forwarded import (
    PRECISION_AWARE,
    TABLES,
    OptionFact,
    moment_dtypes,
    offloaded_fraction,
)
from megatron_dppo.config.lora import adapters_of
from megatron_dppo.config.schema import LoraConfig, PolicyConfig, TrainConfig
from megatron_dppo.model.adapters import LORA_A, LORA_B, Adapters, adapted_linears, trained_elements
from megatron_dppo.model.errors import ModelError
from megatron_dppo.model.families import family_of, layer_counts
from megatron_dppo.model.layout import Layout, layers_of_stage
from megatron_dppo.model.mapping import parameter_count, shard_of
from megatron_dppo.model.rows import Rule
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape
from megatron_dppo.model.splits import ceil_to
from megatron_dppo.spec import (
    ModelSpec,
    RolloutSpec,
    RunSpec,
    ServersSpec,
    TeacherSpec,
    TrainerSpec,
)

Counts = tuple[tuple[int, int], ...]
"""(elements of a parameter, number of parameters of that size) pairs of one group of parameters."""


@dataclass(frozen=True)
class Schedule:
    """How generation and training share time and GPUs.

    Attributes:
        placement: ``separate``: trainer and servers use different GPUs. ``colocated``: servers and trainer take turns
            on all GPUs.
        staleness: number of batches that generation may be ahead.
        drains: whether a weight update waits until each running response has ended. Otherwise the responses continue
            after the update.
    """

    placement: Literal["separate", "colocated"] = "separate"
    staleness: int = 0
    drains: bool = True

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def overlaps(self) -> bool:
        """Whether the trainer trains while servers generate and evaluate."""
        return not self.is_colocated and self.staleness > 0


ON_POLICY = Schedule()
STALE = Schedule(staleness=1, drains=False)
COLOCATED = Schedule("colocated")


@dataclass(frozen=True)
class RankParameters:
    """The parameters of one rank of a pipeline stage.

    The two groups have different numbers of replicas: ``data`` x ``context`` ranks hold the same dense parameters, and
    ``expert_data`` ranks hold the same experts. Without expert parallelism, experts count as dense parameters, as in
    Megatron-Core.
    """

    dense: Counts
    experts: Counts

    @property
    def elements(self) -> int:
        return elements(self.dense) + elements(self.experts)


def elements(counts: Counts) -> int:
    """Return the number of elements in a group of parameters."""
    return sum(size * count for size, count in counts)


@lru_cache(maxsize=4096)
def rank_parameters(shape: ModelShape, layout: Layout, stage: int) -> RankParameters:
    """Count the parameters of each rank of pipeline stage ``stage``; all ranks of a stage hold the same number.

    The counts agree with ``model.mapping.local_parameters``: both divide each parameter among the ranks by the split of
    the family's rule for it.
    """
    family = family_of(shape)
    layers = layers_of_stage(shape, layout, stage)
    is_first = stage == 0
    is_last = stage == layout.pipeline - 1
    dense = layer_counts(shape, layers)
    if is_first:
        dense.append((family.embedding, 1))
    if is_last:
        dense.append((family.final_norm, 1))
    if is_last and not shape.tied_embeddings:
        dense.append((family.output, 1))
    if is_last and shape.tied_embeddings and not is_first:
        # The last stage holds a copy of the embedding and uses it as the output matrix.
        dense.append((family.embedding, 1))
    rank_experts = _moe_layers(shape, layers) * shape.num_experts // layout.expert
    experts = [(rule, rank_experts) for rule in family.expert]
    dense_counts = _counts_on_a_rank(dense, shape, layout.tensor)
    expert_counts = _counts_on_a_rank(experts, shape, layout.expert_tensor)
    if layout.expert == 1:
        return RankParameters(dense_counts + expert_counts, ())
    return RankParameters(dense_counts, expert_counts)


def linear_elements(shape: ModelShape, layout: Layout, stage: int) -> int:
    """Count the elements of the layers' linear weights on each rank of ``stage``, without routers."""
    family = family_of(shape)
    layers = layers_of_stage(shape, layout, stage)
    rank_experts = _moe_layers(shape, layers) * shape.num_experts // layout.expert
    dense = [(rule, count) for rule, count in layer_counts(shape, layers) if _is_linear(rule)]
    experts = [(rule, rank_experts) for rule in family.expert if _is_linear(rule)]
    dense_counts = _counts_on_a_rank(dense, shape, layout.tensor)
    expert_counts = _counts_on_a_rank(experts, shape, layout.expert_tensor)
    return elements(dense_counts) + elements(expert_counts)


def _is_linear(rule: Rule) -> bool:
    return re.search(r"\.linear_\w+\.weight", rule.megatron) is not None


def _moe_layers(shape: ModelShape, layers: Iterable[int]) -> int:
    """Count the layers with experts among ``layers``."""
    return sum(layer in shape.moe_layers for layer in layers)


def _counts_on_a_rank(rules: Iterable[tuple[Rule, int]], shape: ModelShape, ranks: int) -> Counts:
    """Return (elements on one rank, count) for each rule; ``ranks`` ranks divide the rule's parameter."""
    counts: list[tuple[int, int]] = []
    for rule, count in rules:
        if count:
            shard = shard_of(rule.split, rule.sources, shape, 0, ranks)
            counts.append((math.prod(shard.shape), count))
    return tuple(counts)


@dataclass(frozen=True)
class Trained:
    """The trained parameters of a model whose other parameters are frozen."""

    adapters: Adapters
    routers: bool

    @classmethod
    def of(cls, lora: LoraConfig, shape: ModelShape) -> Trained | None:
        """Return the trained parameters that the section configures; None if all parameters are trained."""
        adapters = adapters_of(lora, shape)
        if adapters is None:
            return None
        return cls(adapters, lora.train_router)

    def parameters(self, shape: ModelShape, layout: Layout, stage: int) -> RankParameters:
        """Count the trained parameters of each rank of ``stage``.

        Each adapted matrix has two parameters, A and B. If experts do not share adapters, one parameter stacks the A of
        all experts on the rank, and another stacks the B.
        """
        dense: list[tuple[int, int]] = []
        experts: list[tuple[int, int]] = []
        adapter_rank = self.adapters.rank
        first_rank = stage * layout.stage_ranks
        for linear in adapted_linears(self.adapters, shape, layout, first_rank):
            group = experts if linear.experts and layout.expert > 1 else dense
            stacked = max(1, len(linear.experts))
            for part in linear.parts:
                for factor in (LORA_A, LORA_B):
                    # If experts share an adapter, every rank holds the whole adapter.
                    dims_of = part.whole_dims if linear.is_shared_by_experts else part.local_dims
                    dims = dims_of(factor, adapter_rank)
                    group.append((math.prod(dims) * stacked, 1))
        if self.routers:
            routers = _moe_layers(shape, layers_of_stage(shape, layout, stage))
            dense.append((shape.num_experts * shape.hidden_size, routers))
        return RankParameters(tuple(dense), tuple(experts))

    def elements(self, shape: ModelShape) -> int:
        """Count the trained elements of the whole model."""
        return trained_elements(shape, self.adapters, routers=self.routers)

    def trained_base(self, shape: ModelShape, layout: Layout, stage: int) -> int:
        """Count the elements of the model's own parameters that ``stage`` trains: the routers, or nothing."""
        if not self.routers:
            return 0
        routers = _moe_layers(shape, layers_of_stage(shape, layout, stage))
        return shape.num_experts * shape.hidden_size * routers


PACKING = 0.9
"""Share of a micro-batch's token budget that sequences fill. Assumption. The rest stays empty, because no sequence is
divided between micro-batches."""
EVALUATION_PROBLEMS = 30
"""Assumed problems of a held-out set if they can't be counted on this machine: as many as AIME has."""


_FLOAT = 4


@dataclass(frozen=True)
class AdamFacts:
    """Bytes of a trained element's Adam state, on the device and in host memory.

    Attributes:
        master: bytes of the fp32 master, 0 for a float32 weight.
        moments: bytes of both moments.
        offloaded: share of the elements whose state is in host memory.
        masters_on_device: whether the device also holds the masters of offloaded elements.
    """

    master: int
    moments: int
    offloaded: float = 0.0
    masters_on_device: bool = False

    @classmethod
    def of(cls, config: PolicyConfig) -> AdamFacts:
        """Return the state that the ``megatron_optimizer`` table configures.

        Offloaded moments are fp32, even if the table sets another dtype for moments. Without the precision-aware
        optimizer, Megatron-Core keeps the masters of offloaded elements on the device and copies of them on the host.
        """
        table = config.megatron_optimizer
        offloaded = offloaded_fraction(table)
        moments = 2 * _FLOAT
        if not offloaded:
            moments = sum(ITEM_BYTES[dtype] for dtype in moment_dtypes(table))
        return cls(
            master=0 if config.model.dtype == "float32" else _FLOAT,
            moments=moments,
            offloaded=offloaded,
            masters_on_device=not table.get(PRECISION_AWARE),
        )

    @property
    def device(self) -> float:
        """Bytes of an element's state on the device."""
        moment_share = 1 - self.offloaded
        master_share = 1.0 if self.masters_on_device else moment_share
        return self.master * master_share + self.moments * moment_share

    @property
    def host(self) -> float:
        """Bytes of an element's state in host memory: an fp32 copy of the weight, an fp32 gradient, and moments.

        Copy and gradient are page-locked. torch rounds page-locked memory up to a power of two, so the copy and the
        gradient are each counted with twice their size.
        """
        return self.offloaded * (2 * _FLOAT + 2 * _FLOAT + self.moments)

    @property
    def stored(self) -> int:
        """Bytes of an element's state in a checkpoint."""
        return self.master + self.moments


@dataclass(frozen=True)
class TrainerFacts(TrainerSpec):
    """The facts of the trainer.

    Attributes:
        config: the configuration.
        shape: the model.
        trained: the trained parameters; None if all are trained.
        adam: Adam's state.
        tokens: tokens of the longest micro-batch. A sequence longer than the token budget is alone in a micro-batch.
        micro_batches: micro-batches of one replica in one optimiser step.
        transformer_engine: whether the layers are Transformer Engine's; otherwise they are torch's.
    """

    config: PolicyConfig
    shape: ModelShape
    trained: Trained | None
    adam: AdamFacts
    tokens: int
    micro_batches: int
    transformer_engine: bool

    @property
    def item_bytes(self) -> int:
        """Bytes of a weight and of an activation."""
        return ITEM_BYTES[self.config.model.dtype]

    @property
    def recompute(self) -> str:
        """``training.recompute``."""
        return self.config.training.recompute

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of a gradient."""
        if self.config.megatron_ddp.get("grad_reduce_in_fp32", True):
            return _FLOAT
        return self.item_bytes

    @property
    def logit_bytes(self) -> int:
        """Bytes of one logit."""
        dtype = self.config.head.dtype
        if dtype == "model":
            return self.item_bytes
        return ITEM_BYTES[dtype]

    @property
    def exchange(self) -> str:
        """How context-parallel ranks exchange keys and values for attention, ``p2p`` or ``a2a``."""
        return self.config.megatron.get("cp_comm_type") or "p2p"

    @property
    def rank_tokens(self) -> int:
        """Tokens of the longest micro-batch on one context-parallel rank."""
        return self.tokens // self.layout.context

    @property
    def trained_elements(self) -> int:
        """Trained elements of the whole model, without padding."""
        if self.trained is None:
            return parameter_count(self.shape)
        return self.trained.elements(self.shape)

    def checkpoint_bytes(self, trained: int) -> int:
        """Return the bytes of a checkpoint of ``trained`` elements: weights and optimizer state."""
        return trained * (self.item_bytes + self.adam.stored)


@dataclass(frozen=True)
class RolloutFacts(RolloutSpec):
    """One rollout batch, with mean lengths in tokens, which are assumptions or measurements.

    ``topk`` counts every distribution that a token carries: mu's, or the recomputed policy's, which then replaces
    TopK(mu).
    """

    mean_prompt: float
    mean_response: float

    @property
    def mean_length(self) -> float:
        """Mean tokens of a sequence, prompt and response."""
        return self.mean_prompt + self.mean_response

    @property
    def compared_topk(self) -> int:
        """Ids of a token at which the trainer computes log-probabilities: those of mu, and those of a teacher."""
        return self.topk + (self.teacher_topk or 0)

    @property
    def tokens(self) -> float:
        """Tokens of a rollout batch; each response counts with its prompt."""
        return self.responses * self.mean_length

    @property
    def response_tokens(self) -> float:
        """Sampled tokens of a rollout batch."""
        return self.responses * self.mean_response


@dataclass(frozen=True)
class RunFacts:
    """A run with the assumptions of its plan.

    Attributes:
        config: the configuration.
        spec: the facts that follow from the configuration.
        trainer, rollout: the facts of these parts, with assumptions.
        engine: the servers.
        schedule: how generation and training share time and GPUs.
        evaluated_problems: problems of all held-out sets; 0 without an evaluation.
    """

    config: TrainConfig
    spec: RunSpec
    trainer: TrainerFacts
    rollout: RolloutFacts
    engine: ServersSpec
    schedule: Schedule
    evaluated_problems: int

    @property
    def not_counted(self) -> list[str]:
        """The settings of the libraries that no formula reads although they may change memory or time."""
        settings = []
        for name, table in TABLES.items():
            counted_keys = table.options_with(OptionFact.COUNTED)
            for key in getattr(self.config, name):
                if key not in counted_keys:
                    settings.append(f"{name}.{key}")
        return settings

    @property
    def sends_shards(self) -> bool:
        """Whether weight updates bring each engine rank only what it keeps."""
        return self.config.weight_sync.strategy != "disk" and self.engine.started > 0

    @property
    def sends_in_group(self) -> bool:
        """Whether trainer ranks and engine ranks join a group for weight updates."""
        return self.config.weight_sync.strategy == "distributed" and self.engine.started > 0

    def batches(self) -> dict[str, float]:
        """Return the sizes of batches.

        ``per_step`` = responses / steps is the number of responses that an optimiser step trains on. Each replica
        trains on ``replica`` = per_step / DP of these. Each replica has one leader, and the leader requests
        ``per_leader`` = responses / DP responses. ``tokens`` counts sequences of mean length; ``longest_tokens`` counts
        sequences that reach both limits.
        """
        rollout = self.rollout
        data = self.trainer.layout.data
        per_step = rollout.responses // rollout.steps
        return {
            "responses": rollout.responses,
            "tokens": rollout.tokens,
            "longest_tokens": rollout.responses * rollout.longest,
            "optimizer_steps": rollout.steps,
            "per_step": per_step,
            "replica": per_step / data,
            "micro_batches": self.trainer.micro_batches,
            "micro_batch_tokens": self.trainer.tokens,
            "per_leader": rollout.responses / data,
        }


def facts_of(
    config: TrainConfig,
    shape: ModelShape,
    *,
    mean_response: float | None = None,
    mean_prompt: float | None = None,
    gpu: bool = True,
) -> RunFacts:
    """Return the facts of a run.

    The number of micro-batches is a replica's tokens / (a micro-batch's tokens x ``PACKING``), at least 1.

    Args:
        config: The configuration; its layout must have passed its checks.
        shape: The shape of the model.
        mean_response: Mean tokens of a response; by default half of the longest response.
        mean_prompt: Mean tokens of a prompt; by default a quarter of the longest prompt.
        gpu: Whether the trainer's layers are Transformer Engine's; otherwise they are torch's.

    Raises:
        ConfigError: The algorithm is unknown.
    """
    spec = RunSpec.of_model(config, ModelSpec.of(config, shape, {}), "cuda")
    teachers = [
        TeacherSpec.of(config, name, _shape_of_teacher(teacher.hf_checkpoint), "cuda")
        for name, teacher in config.distillation.teachers.items()
    ]
    spec = replace(spec, teachers=tuple(teachers))
    prompt, response = spec.rollout.longest_prompt, spec.rollout.longest_response
    rollout = RolloutFacts(
        **vars(spec.rollout),
        mean_prompt=prompt / 4 if mean_prompt is None else mean_prompt,
        mean_response=response / 2 if mean_response is None else mean_response,
    )
    if spec.algorithm.preset.whole_vocabulary:
        rollout = replace(rollout, topk=shape.vocab_size)
    replica_responses = -(-config.mini_batch_responses // spec.trainer.layout.data)
    budget = max(config.training.micro_batch_tokens, rollout.longest)
    micro_batches = max(1, round(replica_responses * rollout.mean_length / (budget * PACKING)))
    return RunFacts(
        config=config,
        spec=spec,
        trainer=trainer_facts(config, spec.trainer, shape, micro_batches, rollout.longest, gpu=gpu),
        rollout=rollout,
        engine=spec.servers,
        schedule=schedule_of(config),
        evaluated_problems=sum(
            _count_problems(file.path) for file in config.data.evaluation_files.values()
        ),
    )


@cache
def _shape_of_teacher(folder: str) -> ModelShape:
    """Return the model of a teacher's folder, or the known model of its name."""
    try:
        return read_model(folder).shape
    except ModelError as error:
        reason = str(error).removeprefix("model.hf_checkpoint: ")
        raise ConfigError([f"distillation.teachers: {reason}"]) from error


def schedule_of(config: TrainConfig) -> Schedule:
    """Return the configured schedule.

    Without staleness, no response is running when a weight update begins, so that the schedule drains.
    """
    rollout = config.rollout
    drains = rollout.interrupt == "drain" or rollout.max_staleness == 0
    return Schedule(config.engine.placement, rollout.max_staleness, drains=drains)


def _count_problems(path: str) -> int:
    """Return the number of problems in a held-out set, one for each line of JSON Lines.

    The number is ``EVALUATION_PROBLEMS`` if a file is missing or has another format.
    """
    files = data_files(path).files
    if not files or any(file.suffix != ".jsonl" or not file.is_file() for file in files):
        return EVALUATION_PROBLEMS
    return sum(_count_lines(file) for file in files)


def _count_lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def trainer_facts(
    config: PolicyConfig,
    spec: TrainerSpec,
    shape: ModelShape,
    micro_batches: int,
    longest_sequence: int,
    *,
    gpu: bool,
) -> TrainerFacts:
    """Return the facts of the trainer.

    Args:
        config: The configuration of the policy.
        spec: The trainer of this configuration.
        shape: The shape of the model.
        micro_batches: Micro-batches of one replica in one optimiser step.
        longest_sequence: Tokens of the longest sequence.
        gpu: Whether the layers are Transformer Engine's; otherwise they are torch's.
    """
    tokens = max(config.training.micro_batch_tokens, longest_sequence)
    return TrainerFacts(
        **vars(spec),
        config=config,
        shape=shape,
        trained=Trained.of(config.lora, shape),
        adam=AdamFacts.of(config),
        tokens=ceil_to(tokens, spec.token_multiple),
        micro_batches=micro_batches,
        transformer_engine=gpu,
    )
