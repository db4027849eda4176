"""The part of a run that trains on batches, and checks that nothing but training changes the weights."""

from __future__ import annotations

from megatron_dppo.algorithms.algorithm import Algorithm
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.seal import Seal
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.learning import Learner
from megatron_dppo.loop.rollout_sources import BatchSeals, RolloutBatch
from megatron_dppo.loop.spool import ResponseSpool
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.trainer.memory_checks import MemoryChecks
from megatron_dppo.trainer.trainer import Trainer


class BatchTraining:
    """Trains on batches with ``algorithm``. Every method is collective.

    Args:
        config: configuration of the run.
        spec: facts that follow from the configuration.
        data: training problems.
        trainer: holds the weights.
        algorithm: the run's algorithm.

    Attributes:
        algorithm: the run's algorithm.
        learner: does the optimiser steps, and has figures of the last batch.
    """

    def __init__(
        self,
        config: TrainConfig,
        spec: RunSpec,
        data: RunData,
        trainer: Trainer,
        algorithm: Algorithm,
    ) -> None:
        self.algorithm = algorithm
        self.learner = Learner(config, trainer, algorithm, spec.rollout.topk)
        self._watches_optimizer = config.memory_checks.optimizer
        self._memory = MemoryChecks(trainer)
        self._seals = BatchSeals(
            data.origin(),
            config.rollout.max_staleness,
            keeps=config.rollout.save,
            replays=spec.rollout.replays,
        )

    def continue_from(self, step: int, spool: ResponseSpool) -> None:
        """Hash the weights of ``step``, with which this start begins, and store the hash in ``spool``."""
        # Stored responses may have been sampled by versions older than the checkpoint.
        for version, stored_digest in sorted(spool.known_digests.items()):
            self._seals.remember(version, stored_digest)
        digest = self._memory.remember_weights(step)
        self._seals.remember(step, digest)
        spool.note_trained(step, digest)
        if step and self._watches_optimizer:
            # Hash the loaded optimizer state now: minutes may pass until the first step, while the servers start.
            self._memory.remember_optimizer(step)

    def check_batch(self, step: int, batch: RolloutBatch) -> Seal | None:
        """Verify the batch of ``step`` and return its seal, see ``BatchSeals.check``. Raises SealError."""
        return self._seals.check(step, batch)

    def check_memory(self) -> str:
        """Return the hash of all ranks' weights.

        Raises AlteredMemoryError, on every rank, if weights or optimizer state changed since the last step.
        """
        digest = self._memory.check_weights()
        self._memory.check_optimizer()
        return digest

    def check_weights(self) -> None:
        """Raise AlteredMemoryError, on every rank, if the weights changed since the last step."""
        self._memory.check_weights()

    def begin_step(self) -> None:
        """Check weights and optimizer state before the step changes them, as ``check_memory`` does."""
        self.check_memory()
        self._memory.forget_optimizer()

    def end_step(self, step: int, *, is_saved: bool) -> str:
        """Hash the weights that ``step`` made, and return the hash of all ranks' weights.

        ``is_saved``: whether a checkpoint of this step will be due, so that the optimizer state is hashed too. Raises
        AlteredMemoryError, on every rank, if replicas differ.
        """
        digest = self._memory.remember_weights(step)
        if is_saved and self._watches_optimizer:
            self._memory.remember_optimizer(step)
        failpoint("step/trained")
        self._seals.remember(step, digest)
        failpoint("step/sealed")
        return digest
