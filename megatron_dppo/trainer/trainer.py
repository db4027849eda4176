"""The trainer of the policy: model, optimizer and weights. Methods are collective unless their docstring says not."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.config.forwarded import DDP, OPTIMIZER
from megatron_dppo.config.lora import PEFT_WEIGHTS
from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.data.packing import PackedBatch, pack
from megatron_dppo.data.seal import text_digest
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.metrics.sums import MetricSums
from megatron_dppo.model.adapters import CHILD
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import check_layout, raise_faults
from megatron_dppo.model.shape import TRAINER_PARTS, TrainerPart
from megatron_dppo.spec import ModelSpec, TrainerSpec
from megatron_dppo.system.files import sha256_of
from megatron_dppo.trainer import hf_export, hf_loading, megatron_config, model, platform, step
from megatron_dppo.trainer.collectives import agree, all_gather_json
from megatron_dppo.trainer.context_parallel import TokenShare
from megatron_dppo.trainer.lora_policy import AdaptedPolicy
from megatron_dppo.trainer.memory_checks import parameter_name, tensor_hashes
from megatron_dppo.trainer.merged_weights import MergedWeights
from megatron_dppo.trainer.optimizer import build_optimizer
from megatron_dppo.trainer.parking import (
    Parker,
    ParkingResult,
    check_no_transfer,
    drop_quantised_weights,
    held_tensors,
)
from megatron_dppo.trainer.router_replay import RECORDING, ModelReplay
from megatron_dppo.trainer.topology import destroy_topology, init_distributed, init_topology
from megatron_dppo.vocab_parallel.head import HeadOptions
from megatron_dppo.vocab_parallel.policy_stats import FAULTS, fault_message


class ReferenceWeights:
    """A copy of every parameter that training changes. Construct it after the weights are loaded, before training.

    ``with_adapters``: True: copy the adapters too. False: the adapters start without effect, and the reference policy's
    forward pass omits them.
    """

    def __init__(self, chunks: list[GPTModel], *, with_adapters: bool = False) -> None:
        self._copies: list[tuple[Parameter, Tensor]] = []
        for chunk in chunks:
            for name, p in chunk.named_parameters():
                is_adapter = f".{CHILD}." in name
                if p.requires_grad and (with_adapters or not is_adapter):
                    self._copies.append((p, p.data.clone()))

    @property
    def tensors(self) -> list[Tensor]:
        """The copies."""
        return [copy for _, copy in self._copies]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the copies inside this context."""
        trained_data = [p.data for p, _ in self._copies]
        for p, copy in self._copies:
            p.data = copy
        try:
            yield
        finally:
            for (p, _), data in zip(self._copies, trained_data, strict=True):
                p.data = data


def start_digest(digest: str, start_from: str | None) -> str:
    """Return one SHA-256 (hex) of the model's ``digest`` and the adapters in ``start_from``.

    Without ``start_from`` the result is ``digest``.
    """
    if start_from is None:
        return digest
    adapters = sha256_of(Path(start_from) / PEFT_WEIGHTS)
    return hashlib.sha256(f"{digest} {adapters}".encode()).hexdigest()


_NONFINITE = "nonfinite_losses"
"""Name under which the number of non-finite losses is reduced together with the metrics."""
_FAULT_COUNTS = tuple(f"faults/{i}" for i in range(len(FAULTS)))
"""Names under which the counts of ``FAULTS`` are reduced together with the metrics."""


@dataclass(frozen=True)
class StepResult:
    """Results of one optimiser step, the same on every rank.

    Attributes:
        metrics: sums over the trained tokens of all replicas.
        grad_norm: global L2 norm of the gradient before clipping.
        lr: learning rate of this step.
    """

    metrics: MetricSums
    grad_norm: float
    lr: float


class Trainer:
    """A policy in Megatron-Core with its optimizer; one object on every rank.

    Attributes:
        topology: position and process groups of this rank.
        adapted: the policy's LoRA adapters; None if ``lora.rank`` is 0.
        shape: dimensions of the model.
        layout: the sizes of the parallel layout.
        chunks: this rank's GPTModels.
        ddp_chunks: ``chunks`` with Megatron's wrappers around them.
        optimizer: Megatron-Core's optimizer.
        scheduler: Megatron-Core's schedule of the learning rate and the weight decay.
        step_count: number of optimiser steps so far.
        reference_sha256: hash of the tensors that the reference policy was loaded from; None without a reference.
        share: the tokens of a micro-batch that this rank's layers compute.
        input_rows: function from a pack's cu_seqlens to the rows of recorded routing that this rank needs; None: it
            needs all rows.
        pad_multiple: T of a micro-batch must be a multiple of this number, and the length of each sequence a multiple
            of ``share.sequence_multiple``.
        micro_batch_multiple: the number of micro-batches must be a multiple of this number.
    """

    @classmethod
    def read(cls, config: PolicyConfig, stats_spec: step.StatsSpec | None = None) -> Self:
        """Build the trainer of a configuration whose facts are not resolved yet: read the model's shape first.

        Raises ValueError if the layout does not fit the model, the world size or Megatron-Core. Collective.
        """
        facts = ModelSpec.read(config)
        check_layout(config.parallel.sizes, facts.shape, "parallel.")
        return cls(config, facts, TrainerSpec.of(config, facts.shape), stats_spec)

    def __init__(
        self,
        config: PolicyConfig,
        facts: ModelSpec,
        spec: TrainerSpec,
        stats_spec: step.StatsSpec | None = None,
    ) -> None:
        """Join the process group, build the model and load ``config.model.hf_checkpoint``. Collective.

        Args:
            config: settings of the optimizer, the parallel layout and the libraries.
            facts: the model that the configuration names.
            spec: the trainer's layout, and what follows from it.
            stats_spec: the statistics of a forward pass; None: those without Top-K.

        Raises ValueError if this machine's layers do not support the layout.
        """
        self.config = config
        self.stats_spec = stats_spec or step.StatsSpec()
        self.shape = facts.shape
        faults = platform.current().layout_faults(config.parallel.sizes, self.shape)
        raise_faults(faults, "parallel.")
        self.layout = spec.layout
        parallel = config.parallel
        init_distributed(parallel.world_size, parallel.interface, parallel.collective_timeout_s)
        self.topology = init_topology(self.layout)
        platform.seed_everything(config.run.seed)

        self.dtype = megatron_config.DTYPES[config.model.dtype]
        transformer = megatron_config.transformer_config(config, self.shape, self.layout)
        self.chunks = model.build_chunks(transformer, self.shape)
        hf_loading.load_hf(
            self.chunks, self.shape, self.layout, self.topology.rank, config.model.hf_checkpoint
        )
        self.adapted: AdaptedPolicy | None = None
        if facts.adapters is not None:
            self.adapted = AdaptedPolicy(
                config.lora,
                facts.adapters,
                config.model.hf_checkpoint,
                config.run.seed,
                self.shape,
                self.topology,
                self.layout,
                transformer,
                self.chunks,
            )
        self._reference = None
        self.reference_sha256: str | None = None
        self._starts_with_adapters = config.lora.start_from is not None
        if config.keeps_reference:
            self._reference = ReferenceWeights(
                self.chunks, with_adapters=self._starts_with_adapters
            )
            if self.adapted:
                base_digest = self.adapted.base_sha256
            else:
                base_digest = hf_loading.shared_digest(config.model.hf_checkpoint, self.topology)
            self.reference_sha256 = start_digest(base_digest, config.lora.start_from)
        topology = self.topology
        # Tensor-parallel ranks divide the tokens only with sequence parallelism.
        tp_size, tp_rank = 1, 0
        if spec.sequence_parallel:
            tp_size = topology.tp_size
            tp_rank = topology.tp_rank
        self.share = TokenShare(topology.cp_size, topology.cp_rank, tp_size, tp_rank)
        # An interleaved schedule pads micro-batches to equal length. The padding moves the boundaries between the token
        # shares of tensor-parallel ranks, so every rank then needs all rows.
        self.input_rows = None if self.layout.chunks > 1 else self.share.rows
        self._replay: ModelReplay | None = None
        if config.router_replay:
            self._replay = ModelReplay(
                self.chunks, self.shape, self.topology, share=self.share, device=self.device
            )
        self.ddp_chunks = model.wrap_chunks(
            self.chunks,
            transformer,
            megatron_config.library_values(DDP, config.megatron_ddp),
            distributed_optimizer=spec.distributed_optimizer,
        )
        self.optimizer, self.scheduler = build_optimizer(
            config.optimizer,
            self.ddp_chunks,
            self.dtype,
            megatron_config.library_values(OPTIMIZER, config.megatron_optimizer),
            distributed=spec.distributed_optimizer,
        )
        self._parker = Parker(self.held_tensors)
        self.step_count = 0
        self.pad_multiple = spec.token_multiple
        self.micro_batch_multiple = 1
        if self.layout.chunks > 1:
            # The interleaved schedule takes micro-batches in rounds of the pipeline's size.
            self.micro_batch_multiple = self.layout.pipeline
        model.leave_out_logits(self.chunks)
        self._stats = step.StatsFunction(
            self.chunks[-1],
            self.topology,
            self.shape.vocab_size,
            config.temperature,
            self.stats_spec,
            HeadOptions(
                config.head.chunk_tokens,
                megatron_config.HEAD_DTYPES[config.head.dtype],
                raise_on_faults=False,
            ),
        )

    def train_mini_batch(
        self,
        micro_batches: list[PackedBatch],
        token_loss: step.TokenLoss,
        denominator: float,
        *,
        is_last: bool = True,
        check: Callable[[MetricSums], None] | None = None,
    ) -> StepResult:
        """Do one optimiser step on L = (sum of ``token_loss`` over all replicas' tokens) / denominator.

        Args:
            micro_batches: the micro-batches of this replica; the same number on every rank. With
                ``rollout.router_replay`` tokens go to the experts recorded in them.
            token_loss: computes the sum of the loss over the tokens of one micro-batch.
            denominator: a global count, the same on every rank.
            is_last: True: complete the weights now, because they are read before the next forward pass. False: another
                mini-batch follows directly, and its forward pass may gather the weights that other replicas updated
                (``overlap_param_gather``).
            check: called before the update with the metrics. They are equal on every rank. An exception from ``check``
                prevents the update.

        Raises (on every rank, before the update):
            NonFiniteLossError: a loss or the gradient norm is not finite.
            ValueError: ranks disagree, or a token id is outside the vocabulary.
        """
        self.check_resident("train")
        # Compare the denominators, because gradients are summed over the replicas: a replica that divided by another
        # number would go unnoticed.
        agree(denominator, "the loss's denominator")
        batches = self._place_micro_batches(micro_batches)
        for chunk in self.ddp_chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = step.forward_backward(
            self.ddp_chunks, batches, self._stats, token_loss, denominator, self._replay
        )
        metrics, bad_losses = self._reduce(results)
        metrics += self.routing_agreement()
        if check is not None:
            check(metrics)
        grad_norm = model.prepare_step(self.optimizer)
        # Raise on all ranks and before the update, because a NaN in weights and moments cannot be undone.
        if bad_losses or not math.isfinite(grad_norm):
            raise step.NonFiniteLossError(grad_norm, self._culprits(results, batches))
        lr = model.apply_step(self.optimizer, self.scheduler, grad_norm)
        if is_last:
            model.complete_weights(self.ddp_chunks)
        self.step_count += 1
        return StepResult(metrics, grad_norm, lr)

    def log_probs(
        self, micro_batches: list[PackedBatch], temperature: float | None = None
    ) -> list[Tensor]:
        """Compute log pi of the targets in ``loss_mask`` under the current weights, nats, without gradient.

        Args:
            micro_batches: the micro-batches of this replica; the same number on every rank.
            temperature: divides the logits; None: ``config.temperature``.

        Returns:
            fp32 [T] for each micro-batch, 0 at other targets, on the trainer's device; the same on all ranks of a
            replica.

        Raises (on every rank):
            NonFiniteLogProbsError: the logits are not a distribution.
            ValueError: a token id is outside the vocabulary.
        """
        return self._log_probs(micro_batches, temperature, topk=False)

    def reference_log_probs(self, micro_batches: list[PackedBatch]) -> list[Tensor]:
        """Compute ``log_probs`` under the weights that training started from, with the adapters of ``lora.start_from``.
        Other adapters start without effect and are omitted.

        Raises:
            ValueError: the configuration has no reference policy.
        """
        if self._reference is None:
            raise ValueError("algorithm.reference_kl is 0: no reference policy is kept")
        self.check_resident("score by the reference policy", "weights", "reference")
        with self._reference.in_place():
            if self.adapted is None or self._starts_with_adapters:
                return self.log_probs(micro_batches)
            with self.adapted.disabled():
                return self.log_probs(micro_batches)

    def topk_log_probs(self, micro_batches: list[PackedBatch]) -> list[Tensor]:
        """Compute log pi of the ids in each micro-batch's column ``topk_ids``, as ``log_probs`` does: fp32 [T, K]."""
        return self._log_probs(micro_batches, None, topk=True)

    def _log_probs(
        self, micro_batches: list[PackedBatch], temperature: float | None, *, topk: bool
    ) -> list[Tensor]:
        """Compute log pi as ``log_probs`` does; with ``topk``, as ``topk_log_probs`` does. Collective."""
        self.check_resident("score", "weights")
        batches = self._place_micro_batches(micro_batches)
        for chunk in self.ddp_chunks:
            # Disable the adapters' dropout: with dropout the log-probabilities would belong to another policy.
            chunk.eval()
        stats = self._stats
        if temperature is not None:
            stats = replace(stats, temperature=temperature)
        log_probs, fault_counts = step.forward_log_probs(
            self.ddp_chunks, batches, stats, self._replay, topk=topk
        )
        # Check on all ranks before the broadcast over pipeline stages: if only one rank raised, the other ranks
        # would wait in the broadcast.
        self._check_faults(fault_counts)
        if self.topology.pp_size > 1:
            # Only the last stage has computed the values: broadcast them to every rank of the replica.
            sizes = [b.num_tokens for b in batches]
            columns: tuple[int, ...] = ()
            if topk:
                columns = batches[0].column("topk_ids").shape[1:]
            shape = (sum(sizes), *columns)
            flat = torch.cat(log_probs) if log_probs else torch.empty(shape, device=self.device)
            dist.broadcast(flat, self.topology.last_stage_rank, self.topology.pipeline_group)
            log_probs = list(flat.split(sizes))
        # Remove the padding that gave the micro-batches equal length for an interleaved schedule.
        return [x[: b.num_tokens] for x, b in zip(log_probs, micro_batches, strict=True)]

    def _check_faults(self, fault_counts: list[Tensor]) -> None:
        """Raise an error on every rank if any rank has counted a fault in a micro-batch. Collective."""
        totals = torch.zeros(len(FAULTS), device=self.device)
        if fault_counts:
            totals += torch.stack(fault_counts).sum(0)
        dist.all_reduce(totals, dist.ReduceOp.MAX)
        # The last of ``FAULTS`` counts rows of logits, the others count ids.
        *bad_ids, bad_rows = totals.cpu()
        if message := fault_message(bad_ids):
            raise ValueError(message)
        if bad_rows:
            raise step.NonFiniteLogProbsError(
                f"{fault_message(totals.cpu())}; nothing was trained on them"
            )

    @property
    def replayed_layers(self) -> list[int]:
        """Indices of the layers that this rank replays, among the model's layers with a router."""
        return self._replay.layers if self._replay else []

    def routing_agreement(self) -> MetricSums:
        """Return the ``r3/`` sums of the last micro-batches, reduced over all ranks; empty without router replay.

        Collective.
        """
        if self._replay:
            return self._replay.agreement()
        return MetricSums()

    def weights(self) -> Mapping[ParameterKey, Tensor]:
        """Return this rank's current weights by (chunk, name), with the adapters merged into them. Not collective."""
        base_weights = self.base_weights()
        if self.adapted is None:
            return base_weights
        return MergedWeights(base_weights, self.adapted.modules)

    def weights_digest(self) -> str:
        """Hash all ranks' parameters, with adapters as separate parameters, and the parameters' placement on ranks.

        Equal hashes mean bit for bit the same weights under the same layout. Collective.
        """
        # Combine the hashes of each rank into one, so that a step does not gather the hashes of thousands of tensors
        # from hundreds of ranks.
        own_digest = text_digest([list(item) for item in self.parameter_hashes().items()])
        return text_digest(all_gather_json(own_digest))

    def parameter_hashes(self) -> dict[str, str]:
        """Return the hash of each of this rank's parameters, by "chunk/name". Not collective."""
        self.check_resident("hash weights", "weights")
        tensors: dict[str, Tensor] = {}
        for (chunk, name), parameter in model.named_parameters(self.chunks).items():
            tensors[parameter_name(chunk, name)] = parameter.detach()
        return tensor_hashes(tensors)

    def weights_form(self) -> str:
        """Hash the names, shapes and dtypes of all ranks' parameters and their placement on ranks, without the values.

        Two hashes of :meth:`weights_digest` can be compared if their forms are equal. Collective.
        """
        form: list[tuple[int, str, list[int], str]] = []
        for (chunk, name), parameter in model.named_parameters(self.chunks).items():
            form.append((chunk, name, list(parameter.shape), str(parameter.dtype)))
        own_digest = text_digest(form)
        return text_digest(all_gather_json(own_digest))

    def base_weights(self) -> Mapping[ParameterKey, Tensor]:
        """Return this rank's weights without adapters; with LoRA these are the frozen weights. Not collective."""
        self.check_resident("read weights", "weights")
        return {key: p.data for key, p in model.named_parameters(self.chunks).items()}

    def export_hf(self, out_dir: str | Path) -> None:
        """Write the current weights, tokenizer and configuration as a Hugging Face folder.

        The folder is renamed into place when complete.

        Raises:
            CheckpointError: a rank could not write; raised on every rank.
        """
        hf_export.export_hf(
            self.weights(),
            self.topology.rank,
            (self.shape, self.layout, self.dtype),
            out_dir,
            side_files_from=self.config.model.hf_checkpoint,
        )

    def held_tensors(self) -> dict[TrainerPart, list[Tensor]]:
        """Return the long-lived tensors of this rank, by part. Not collective."""
        reference = []
        if self._reference is not None:
            reference = self._reference.tensors
        return held_tensors(self.chunks, self.ddp_chunks, self.optimizer, reference)

    def park(self, parts: Collection[TrainerPart] = TRAINER_PARTS) -> ParkingResult:
        """Move ``parts`` to the host, between two passes; see ``Parker.park``. Not collective.

        Parking does not disturb a background save of a checkpoint, which writes a copy made before ``save`` returned.
        """
        check_no_transfer(self.ddp_chunks)
        if "gradients" in parts:
            self.optimizer.zero_grad()
        drop_quantised_weights(self.chunks)
        return self._parker.park(parts)

    def unpark(self, parts: Collection[TrainerPart] | None = None) -> ParkingResult:
        """Move ``parts`` (None: all that are parked) back; see ``Parker.unpark``. Not collective."""
        return self._parker.unpark(parts)

    @property
    def parked(self) -> frozenset[TrainerPart]:
        """The parts that are parked."""
        return self._parker.parked

    def check_resident(self, action: str, *parts: TrainerPart) -> None:
        """Raise ParkedError if one of ``parts``, which ``action`` needs, is parked. Not collective.

        Without ``parts``, raise ParkedError if any part is parked.
        """
        self._parker.check(action, *parts)

    def close(self) -> None:
        """Reset Megatron's process groups, so that this process can build another Trainer."""
        destroy_topology()

    @cached_property
    def device(self) -> torch.device:
        """The device of the model. Not collective."""
        return platform.current().device

    def packed(self, trajectories: Sequence[Trajectory]) -> list[PackedBatch]:
        """Pack ``trajectories`` into one micro-batch, and append the empty micro-batches that the interleaved schedule
        needs. Not collective.
        """
        packed_batch = pack(
            trajectories,
            pad_multiple=self.pad_multiple,
            sequence_multiple=self.share.sequence_multiple,
        )
        empty_batch = pack([], pad_multiple=self.pad_multiple)
        empty_count = self.micro_batch_multiple - 1
        return [packed_batch] + empty_count * [empty_batch]

    def _place_micro_batches(self, micro_batches: list[PackedBatch]) -> list[PackedBatch]:
        """Check and pad the micro-batches, load their recorded routing and move them to the device. Collective."""
        # Compare the counts, because experts exchange tokens in every micro-batch: a rank with fewer micro-batches
        # would block all other ranks.
        agree(len(micro_batches), "the number of micro-batches")
        step.check_micro_batches(
            micro_batches,
            pad_multiple=self.pad_multiple,
            count_multiple=self.micro_batch_multiple,
            sequence_multiple=self.share.sequence_multiple,
        )
        if self.layout.chunks > 1:
            # The interleaved schedule sends activations forward and gradients back between the same two ranks.
            # megatron-core 0.16.1 mixes up their shapes if micro-batches differ in length.
            most_tokens = max(b.num_tokens for b in micro_batches)
            micro_batches = [step.pad_to(b, most_tokens) for b in micro_batches]
        if self._replay is not None:
            self._replay.load(micro_batches)
        elif any(RECORDING in b.columns for b in micro_batches):
            # Reject the batch: without replay the router may choose other experts than in the rollout, unnoticed.
            raise ValueError("a micro-batch carries recorded routing without rollout.router_replay")
        return [b.without(RECORDING).to(self.device) for b in micro_batches]

    def _reduce(self, results: step.MicroBatchResults) -> tuple[MetricSums, bool]:
        """Return the metrics over all replicas and whether any loss is not finite; the same on all ranks.

        Raises:
            ValueError: a token id is outside the vocabulary; raised on all ranks.
        """
        metrics = results.metrics
        if metrics is not None:
            # Add the fault counts to the metrics: one reduction carries both, without another device synchronization.
            metrics = metrics.add(_NONFINITE, (~torch.stack(results.losses).isfinite()).sum())
            totals = torch.stack(results.fault_counts).sum(0)
            for name, count in zip(_FAULT_COUNTS, totals, strict=True):
                metrics = metrics.add(name, count)
        reduced = step.reduce_metrics(metrics, self.topology)
        sums = dict(reduced.sums)
        # The last of ``FAULTS`` counts rows of logits, the others count ids.
        *bad_ids, bad_rows = (sums.pop(name) for name in _FAULT_COUNTS)
        if message := fault_message(bad_ids):
            raise ValueError(message)
        bad_losses = bool(sums.pop(_NONFINITE) + bad_rows > 0)
        return MetricSums(sums, reduced.maxima, reduced.minima), bad_losses

    def _culprits(self, results: step.MicroBatchResults, batches: list[PackedBatch]) -> list[dict]:
        """Gather the sequences with a non-finite loss from all replicas, for NonFiniteLossError. Collective."""
        topology = self.topology
        nonfinite = []
        if topology.is_first_of_stage:
            nonfinite = results.nonfinite(batches)
        culprits = []
        for micro_batch, sequences in nonfinite:
            culprits.append(
                {"dp_rank": topology.dp_rank, "micro_batch": micro_batch, "sequences": sequences}
            )
        return list(itertools.chain.from_iterable(all_gather_json(culprits)))
