"""The checkpoints of a run: the one that this start continues from, and the ones that it writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import SupervisedConfig, TrainConfig
from megatron_dppo.data.sampling import Sampler
from megatron_dppo.loop.ending import RunFence
from megatron_dppo.loop.resuming import continue_sampler, resume
from megatron_dppo.loop.run_state import RunState, last_due, settings_of
from megatron_dppo.metrics import records
from megatron_dppo.trainer.checkpoint.store import CheckpointStore
from megatron_dppo.trainer.collectives import on_rank_0
from megatron_dppo.trainer.trainer import Trainer


class RunCheckpoints:
    """Loads the checkpoint that this start of the run continues from, and writes the next ones.

    Every public method except ``is_due`` is collective.

    Args:
        config: configuration of the run.
        trainer: holds the weights, the optimizer state and the random generators.
        fence: raises once another start of the run has taken over.
        published: called on rank 0 with the step once a checkpoint is complete, from any thread.

    Attributes:
        store: the files of all checkpoints; the caller closes it.
        saved_step: step of the newest checkpoint that was loaded, or whose save was begun; 0 without such a checkpoint.
            Suspect checkpoints do not count.
        is_fresh: whether the run begins at step 0 now. Ranks that are restarted before the first checkpoint load no
            state either, but the run has begun already.
    """

    def __init__(
        self,
        config: TrainConfig | SupervisedConfig,
        trainer: Trainer,
        fence: RunFence,
        published: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._fence = fence
        self._published = published
        self.store = CheckpointStore(
            Path(config.run.directory) / records.CHECKPOINTS_FOLDER,
            config.checkpoint.keep,
            fence.check_together,
            background=config.checkpoint.background,
            published=self._note_published,
        )
        self.saved_step = 0
        self.is_fresh = False

    def _note_published(self, step: int) -> None:
        """Record that the checkpoint of ``step`` is complete. Called on rank 0, from any thread."""
        records.remember_checkpoint(self._config.run.directory, step)
        self._published(step)

    def resume(
        self, sampler: Sampler, identity: dict[str, Any], *, replays: bool = False
    ) -> RunState:
        """Load the state that this start continues from into the trainer and ``sampler``, and return it.

        ``identity``: settings that must not change between starts. ``replays``: whether the run reads saved rollouts.
        Raises ResumeError and DamagedCheckpointError, as ``resuming.resume`` does.
        """
        config = self._config
        run = config.run
        nonce = self._fence.nonce
        self._fence.check_together()
        has_begun = on_rank_0(partial(records.has_begun, run.directory, nonce))
        state = resume(
            run,
            config.checkpoint,
            self._trainer,
            self.store,
            identity,
            replays=replays,
            nonce=nonce,
        )
        if state is None:
            self.is_fresh = not has_begun
            return RunState(sampler=sampler.state_dict(), identity=identity)
        self.saved_step = state.step
        continue_sampler(sampler, state, config)
        return state

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step``: every ``checkpoint.every`` steps, and after the last."""
        return last_due(step, self._config.checkpoint.every, self._config.run.steps) == step

    def save(self, state: RunState, weights: str, *, suspect: bool = False) -> None:
        """Start writing a checkpoint of the step of ``state``, after the previous checkpoint is complete.

        Sets ``weights`` and ``settings`` of ``state``. ``weights``: hash of all ranks' weights. A ``suspect``
        checkpoint is only read by ``megatron-dppo doctor``; no start loads it. Raises CheckpointError and FencedError.
        """
        state.weights = {self._trainer.weights_form(): weights}
        state.settings = on_rank_0(partial(settings_of, self._config))
        self.store.save(self._trainer, state.step, state.to_json(), suspect=suspect)
        if not suspect:
            self.saved_step = state.step
