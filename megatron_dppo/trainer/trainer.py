"""The trainer of the policy: model, optimizer and weights. Methods are collective unless stated."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

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
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import Layout, check_layout, raise_faults
from megatron_dppo.model.shape import TRAINER_PARTS, TrainerPart
from megatron_dppo.system.files import sha256_of
from megatron_dppo.tensor_hash import TiledHash, add_parts
from megatron_dppo.trainer import hugging_face, megatron_config, model, platform, step
from megatron_dppo.trainer.collectives import agree, all_gather_json
from megatron_dppo.trainer.context_parallel import TokenShare
from megatron_dppo.trainer.lora_policy import AdaptedPolicy, MergedWeights
from megatron_dppo.trainer.parking import Moved, Parker, check_no_transfer, held_tensors
from megatron_dppo.trainer.router_replay import RECORDING, ModelReplay
from megatron_dppo.trainer.topology import destroy_topology, init_distributed, init_topology
from megatron_dppo.vocab_parallel.head import HeadOptions
from megatron_dppo.vocab_parallel.policy_stats import FAULTS, describe


class ReferenceWeights:
    """A copy of every parameter that training changes. Make it once the weights are loaded and before they are trained.

    ``with_adapters`` False: but for the adapters, which start as nothing and are left out of a reference's pass.
    """

    def __init__(self, chunks: list[GPTModel], *, with_adapters: bool = False) -> None:
        self._copies: list[tuple[Parameter, Tensor]] = [
            (p, p.data.clone())
            for chunk in chunks
            for name, p in chunk.named_parameters()
            if p.requires_grad and (with_adapters or f".{CHILD}." not in name)
        ]

    @property
    def tensors(self) -> list[Tensor]:
        return [copy for _, copy in self._copies]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the model computes with the copies."""
        present = [p.data for p, _ in self._copies]
        for p, copy in self._copies:
            p.data = copy
        try:
            yield
        finally:
            for (p, _), data in zip(self._copies, present, strict=True):
                p.data = data


def start_digest(digest: str, start_from: str | None) -> str:
    """SHA-256 (hex) of ``digest``, the model's, and the bytes of ``lora.start_from``."""
    if start_from is None:
        return digest
    adapters = sha256_of(Path(start_from) / PEFT_WEIGHTS)
    return hashlib.sha256(f"{digest} {adapters}".encode()).hexdigest()


_NONFINITE = "nonfinite_losses"
_FAULTS = tuple(f"faults/{i}" for i in range(len(FAULTS)))


@dataclass(frozen=True)
class StepResult:
    """Results of one optimiser step, the same on every rank.

    Attributes:
        metrics: sums over the trained tokens of all replicas.
        grad_norm: global L2 norm before clipping.
        lr: learning rate of this step.
    """

    metrics: MetricSums
    grad_norm: float
    lr: float


class Trainer:
    """A policy in Megatron-Core with its optimizer; one object on every rank.

    Attributes:
        topology: position and process groups of this rank.
        adapted: the model's adapters, where ``lora.rank`` asks for some; else None.
        shape, layout: dimensions of the model; its parallel sizes.
        chunks, ddp_chunks: the GPTModels of this rank, unwrapped and in their wrappers.
        optimizer, scheduler: Megatron-Core's.
        step_count: optimiser steps so far.
        reference_sha256: of the tensors that the reference policy was loaded from; None without one.
        share: the tokens of a micro-batch that this rank's layers compute.
        input_rows: those of a pack's recorded routing that it needs; None: all.
        pad_multiple: T of a micro-batch must be a multiple of it, and each of its sequences of
            ``share.sequence_multiple``.
        micro_batch_multiple: the number of micro-batches must be a multiple of it.
    """

    def __init__(self, config: PolicyConfig, stats_spec: step.StatsSpec | None = None) -> None:
        """Join the process group, build the model, load ``config.model.hf_checkpoint``. Collective.

        Raises ValueError if the layout does not fit the model, the world size or Megatron-Core.
        """
        self.config = config
        self.stats_spec = stats_spec or step.StatsSpec()
        self.shape = load_model_shape(config.model.hf_checkpoint)
        sizes = config.parallel.sizes
        check_layout(sizes, self.shape, "parallel.")
        raise_faults(platform.current().layout_faults(sizes, self.shape), "parallel.")
        self.layout = Layout.of(sizes)
        parallel = config.parallel
        init_distributed(parallel.world_size, parallel.interface, parallel.collective_timeout_s)
        self.topology = init_topology(self.layout)
        platform.seed_everything(config.run.seed)

        self.dtype = megatron_config.DTYPES[config.model.dtype]
        transformer = megatron_config.transformer_config(config, self.shape, self.layout)
        self.chunks = model.build_chunks(transformer, self.shape)
        hugging_face.load_hf(
            self.chunks, self.shape, self.layout, self.topology.rank, config.model.hf_checkpoint
        )
        self.adapted: AdaptedPolicy | None = None
        if config.lora.rank:
            self.adapted = AdaptedPolicy(
                config.lora,
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
        self._starts_adapted = config.lora.start_from is not None
        if config.keeps_reference:
            self._reference = ReferenceWeights(self.chunks, with_adapters=self._starts_adapted)
            checkpoint = config.model.hf_checkpoint
            self.reference_sha256 = start_digest(
                self.adapted.base_sha256
                if self.adapted
                else hugging_face.shared_digest(checkpoint, self.topology),
                config.lora.start_from,
            )
        topology = self.topology
        is_sequence_parallel = sizes.sequence_parallel(self.shape)
        self.share = TokenShare(
            topology.cp_size,
            topology.cp_rank,
            *((topology.tp_size, topology.tp_rank) if is_sequence_parallel else (1, 0)),
        )
        # What equal lengths append to a micro-batch moves the cut between tensor-parallel ranks.
        self.input_rows = None if self.layout.chunks > 1 else self.share.rows
        self._replay: ModelReplay | None = None
        if config.router_replay:
            self._replay = ModelReplay(
                self.chunks,
                self.shape,
                self.topology,
                share=self.share,
                device=self.device,
            )
        self.ddp_chunks = model.wrap_chunks(
            self.chunks,
            transformer,
            megatron_config.library_values(DDP, config.megatron_ddp),
            distributed_optimizer=config.distributed_optimizer,
        )
        self.optimizer, self.scheduler = model.build_optimizer(
            config.optimizer,
            self.ddp_chunks,
            self.dtype,
            megatron_config.library_values(OPTIMIZER, config.megatron_optimizer),
            distributed=config.distributed_optimizer,
        )
        self._parker = Parker(self.held_tensors)
        self.step_count = 0
        self.pad_multiple = self.share.pad_multiple * config.token_multiple
        self.micro_batch_multiple = self.layout.pipeline if self.layout.chunks > 1 else 1
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
        check: Callable[[MetricSums], None] = lambda metrics: None,
    ) -> StepResult:
        """One optimiser step on L = (sum of ``token_loss`` over all replicas' tokens) / denominator.

        Args:
            micro_batches: of this replica; the same number on every rank. With
                ``rollout.router_replay`` tokens go to the experts recorded in them.
            token_loss: sum of the loss over the tokens of one micro-batch.
            denominator: a global count, the same on every rank.
            is_last: the weights are read before the next pass; false: another mini-batch follows at once, whose
                forward pass may gather what other replicas updated (``overlap_param_gather``).
            check: called with the metrics, the same on every rank, before the update; what it raises prevents it.

        Raises (on every rank, before the update):
            NonFiniteLossError: a loss or the gradient norm is not finite.
            ValueError: ranks disagree, or a token id is outside the vocabulary.
        """
        self.check_resident("train")
        # Gradients are summed over the replicas: nothing else would show that one of them divided by another number.
        agree(denominator, "the loss's denominator")
        batches = self._placed(micro_batches)
        for chunk in self.ddp_chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = step.forward_backward(
            self.ddp_chunks, batches, self._stats, token_loss, denominator, self._replay
        )
        metrics, bad_losses = self._reduce(results)
        metrics += self.routing_agreement()
        check(metrics)
        grad_norm = model.prepare_step(self.optimizer)
        # On all ranks, and before the update: weights and moments that took a NaN can't be taken back.
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
        """log pi of every target under the current weights, nats, without gradient.

        Args:
            micro_batches: of this replica; the same number on every rank.
            temperature: default: ``config.temperature``.

        Returns:
            fp32 [T] for each micro-batch, on the trainer's device; the same on all ranks of a
            replica.

        Raises (on every rank alike):
            NonFiniteLogProbsError: the logits are no distribution.
            ValueError: a token id lies outside the vocabulary.
        """
        return self._log_probs(micro_batches, temperature, topk=False)

    def reference_log_probs(self, micro_batches: list[PackedBatch]) -> list[Tensor]:
        """As ``log_probs``, under the weights that training started from, those of ``lora.start_from`` included; other
        adapters started as nothing and are left out.

        Raises ValueError where the configuration asks for no reference.
        """
        if self._reference is None:
            raise ValueError("algorithm.reference_kl is 0: no reference policy is kept")
        self.check_resident("score by the reference policy", "weights", "reference")
        left_out = None if self._starts_adapted else self.adapted
        adapters = nullcontext() if left_out is None else left_out.frozen()
        with self._reference.in_place(), adapters:
            return self.log_probs(micro_batches)

    def topk_log_probs(self, micro_batches: list[PackedBatch]) -> list[Tensor]:
        """As ``log_probs``, of the ids in each micro-batch's column ``topk_ids``: fp32 [T, K]."""
        return self._log_probs(micro_batches, None, topk=True)

    def _log_probs(
        self, micro_batches: list[PackedBatch], temperature: float | None, *, topk: bool
    ) -> list[Tensor]:
        self.check_resident("score", "weights")
        batches = self._placed(micro_batches)
        for chunk in self.ddp_chunks:
            # Adapters may have dropout, with which these would be another policy's.
            chunk.eval()
        stats = (
            self._stats if temperature is None else replace(self._stats, temperature=temperature)
        )
        log_probs, faults = step.forward_log_probs(
            self.ddp_chunks, batches, stats, self._replay, topk=topk
        )
        # Before the stages' broadcast: a rank that raised alone would leave the others waiting in it.
        self._check_faults(faults)
        if self.topology.pp_size > 1:
            # The last stage alone has computed them; every rank of a replica goes on with the same.
            sizes = [b.num_tokens for b in batches]
            shape = (sum(sizes), *(batches[0].column("topk_ids").shape[1:] if topk else ()))
            flat = torch.cat(log_probs) if log_probs else torch.empty(shape, device=self.device)
            dist.broadcast(flat, self.topology.last_stage_rank, self.topology.pipeline_group)
            log_probs = list(flat.split(sizes))
        # Without what made the micro-batches equally long for an interleaved schedule.
        return [x[: b.num_tokens] for x, b in zip(log_probs, micro_batches, strict=True)]

    def _check_faults(self, faults: list[Tensor]) -> None:
        """Raise on every rank where any rank's statistics have faults. Collective."""
        counts = torch.zeros(len(FAULTS), device=self.device)
        if faults:
            counts += torch.stack(faults).sum(0)
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        *bad_ids, bad_rows = counts.cpu()
        if fault := describe(bad_ids):
            raise ValueError(fault)
        if bad_rows:
            raise step.NonFiniteLogProbsError(
                f"{describe(counts.cpu())}; nothing was trained on them"
            )

    @property
    def replayed_layers(self) -> list[int]:
        """Places, among the model's layers that route, of those that this rank replays."""
        return self._replay.layers if self._replay else []

    def routing_agreement(self) -> MetricSums:
        """``r3/`` sums of the last micro-batches, reduced over all ranks; empty without router replay.

        Collective.
        """
        return self._replay.agreement() if self._replay else MetricSums()

    def weights(self) -> Mapping[ParameterKey, Tensor]:
        """This rank's present weights by (chunk, name), adapters merged into them. Not collective."""
        plain = self.base_weights()
        return plain if self.adapted is None else MergedWeights(plain, self.adapted.modules)

    def weights_digest(self) -> str:
        """Hash of all ranks' parameters, adapters as what they are, and of who holds which: bit for bit the same
        weights under the same layout. Collective."""
        self.check_resident("hash weights", "weights")
        parameters = {
            f"{chunk}/{name}": p.detach()
            for (chunk, name), p in model.named_parameters(self.chunks).items()
        }
        hashes = {name: TiledHash(p.numel() * p.element_size()) for name, p in parameters.items()}
        # One kernel for all of a rank's parameters.
        add_parts([(hashes[name], p, 0) for name, p in parameters.items()])()
        # Each rank's in one: thousands of tensors on each of hundreds of ranks are not to be gathered in every step.
        digest_by_rank = all_gather_json(
            text_digest([[name, h.hexdigest()] for name, h in hashes.items()])
        )
        return text_digest(digest_by_rank)

    def weights_form(self) -> str:
        """Hash of who holds which parameters, and of their shapes and dtypes; values are not read. Hashes of
        :meth:`weights_digest` can be compared where their forms are equal. Collective."""
        parameters = model.named_parameters(self.chunks).items()
        form = [[chunk, name, list(p.shape), str(p.dtype)] for (chunk, name), p in parameters]
        return text_digest(all_gather_json(text_digest(form)))

    def base_weights(self) -> Mapping[ParameterKey, Tensor]:
        """This rank's weights without any adapters: with ``lora``, the frozen ones. Not collective."""
        self.check_resident("read weights", "weights")
        return {key: p.data for key, p in model.named_parameters(self.chunks).items()}

    def export_hf(self, out_dir: str | Path) -> None:
        """Write the current weights, tokenizer and configuration as a Hugging Face folder.

        The folder is renamed into place when complete. Raises CheckpointError on every rank where
        one cannot write.
        """
        hugging_face.export_hf(
            self.weights(),
            self.topology.rank,
            (self.shape, self.layout, self.dtype),
            out_dir,
            side_files_from=self.config.model.hf_checkpoint,
        )

    def held_tensors(self) -> dict[TrainerPart, list[Tensor]]:
        """All that lives on this rank's device through the run, by part. Not collective."""
        reference = [] if self._reference is None else self._reference.tensors
        return held_tensors(self.chunks, self.ddp_chunks, self.optimizer, reference)

    def park(self, parts: Collection[TrainerPart] = TRAINER_PARTS) -> Moved:
        """Move ``parts`` to the host, between two passes; see ``Parker.park``. Not collective.

        A checkpoint that is being written in the background doesn't mind: it has its copy since ``save`` returned.
        """
        check_no_transfer(self.ddp_chunks)
        if "gradients" in parts:
            self.optimizer.zero_grad()
        return self._parker.park(parts)

    def unpark(self, parts: Collection[TrainerPart] | None = None) -> Moved:
        """Move ``parts`` (None: all that are parked) back; see ``Parker.unpark``. Not collective."""
        return self._parker.unpark(parts)

    @property
    def parked(self) -> frozenset[TrainerPart]:
        """What is parked."""
        return self._parker.parked

    def check_resident(self, action: str, *parts: TrainerPart) -> None:
        """Raise ParkedError where one of ``parts`` (none: of all), which ``action`` uses, is parked. Not collective."""
        self._parker.check(action, *parts)

    def close(self) -> None:
        """Reset Megatron's process groups, so that this process can build another Trainer."""
        destroy_topology()

    @cached_property
    def device(self) -> torch.device:
        """Device of the model. Not collective."""
        return platform.current().device

    def packed(self, trajectories: Sequence[Trajectory]) -> list[PackedBatch]:
        """All of them as one micro-batch, and empty ones after it, as many as the schedule takes. Not collective."""
        first = pack(
            trajectories,
            pad_multiple=self.pad_multiple,
            sequence_multiple=self.share.sequence_multiple,
        )
        empty = pack([], pad_multiple=self.pad_multiple)
        return [first, *[empty] * (self.micro_batch_multiple - 1)]

    def _placed(self, micro_batches: list[PackedBatch]) -> list[PackedBatch]:
        # Experts exchange tokens in every micro-batch: a rank with fewer would block all others.
        agree(len(micro_batches), "the number of micro-batches")
        step.check_micro_batches(
            micro_batches,
            pad_multiple=self.pad_multiple,
            count_multiple=self.micro_batch_multiple,
            sequence_multiple=self.share.sequence_multiple,
        )
        if self.layout.chunks > 1:
            # The interleaved schedule sends activations forward and gradients back between the same
            # two ranks; megatron-core 0.16.1 mixes up their shapes if micro-batches differ in length.
            longest = max(b.num_tokens for b in micro_batches)
            micro_batches = [step.pad_to(b, longest) for b in micro_batches]
        if self._replay is not None:
            self._replay.load(micro_batches)
        elif any(RECORDING in b.columns for b in micro_batches):
            # Trained by other experts than it was sampled with, the batch would look like any other.
            raise ValueError("a micro-batch carries recorded routing without rollout.router_replay")
        return [b.without(RECORDING).to(self.device) for b in micro_batches]

    def _reduce(self, results: step.MicroBatchResults) -> tuple[MetricSums, bool]:
        """Metrics over all replicas, and whether any loss is not finite; the same on all ranks.

        Raises ValueError on all ranks if a token id was outside the vocabulary.
        """
        metrics = results.metrics
        if metrics is not None:
            # Among the metrics, so that their one reduction carries them and the device is not asked once more.
            metrics = metrics.add(_NONFINITE, (~torch.stack(results.losses).isfinite()).sum())
            for name, count in zip(_FAULTS, torch.stack(results.faults).sum(0), strict=True):
                metrics = metrics.add(name, count)
        reduced = step.reduce_metrics(metrics, self.topology)
        sums = dict(reduced.sums)
        *bad_ids, bad_rows = (sums.pop(name) for name in _FAULTS)
        if fault := describe(bad_ids):
            raise ValueError(fault)
        bad_losses = bool(sums.pop(_NONFINITE) + bad_rows > 0)
        return MetricSums(sums, reduced.maxima, reduced.minima), bad_losses

    def _culprits(self, results: step.MicroBatchResults, batches: list[PackedBatch]) -> list[dict]:
        topology = self.topology
        nonfinite = results.nonfinite(batches) if topology.is_first_of_stage else []
        entries = [
            {"dp_rank": topology.dp_rank, "micro_batch": i, "sequences": s} for i, s in nonfinite
        ]
        return [entry for rank in all_gather_json(entries) for entry in rank]
