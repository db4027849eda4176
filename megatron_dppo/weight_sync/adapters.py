"""Weight updates that send adapters alone: the same transaction, with the engines' own LoRA.

The engines hold the frozen model, compared tensor by tensor at an engine's first update. The adapters of each version
are a folder in PEFT's format that they load under a name of its own; what they loaded is hashed there. Until the
commit those of the version before are there, too: an update that fails leaves them in service.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_dppo.checkpoint_conversion.adapters import AdapterFolder, peft_names
from megatron_dppo.checkpoint_conversion.tensor_store import byte_view
from megatron_dppo.engine.protocol import UNVERIFIED_VERSION, adapter_name
from megatron_dppo.engine.weights import EngineWeights, fused_module
from megatron_dppo.weight_sync import transaction, verification
from megatron_dppo.weight_sync.engines import (
    GRACE_S,
    Bucket,
    EngineFaultError,
    Engines,
    Strategy,
    Transfer,
)
from megatron_dppo.weight_sync.strategies import new_folder, require_shared_folder

log = logging.getLogger(__name__)


class AdapterStrategy(Strategy):
    """See ``engines.Strategy``; rank 0 writes all. The folder is removed when the engines have read it.

    ``folder``: what it says of the adapters. ``name``: what the engines are to call them. ``loaded``: how many
    tensors were compared in the last update, over all engines. Raises EngineMismatchError as ``DiskStrategy``.
    """

    def __init__(self, transfer: Transfer, folder: AdapterFolder) -> None:
        super().__init__(transfer)
        require_shared_folder(transfer)
        self._folder = folder
        self._tensors: list[tuple[str, Tensor]] = []
        self._written: Path | None = None
        self.name = ""
        self.loaded = 0

    def begin(self, meeting_points: Sequence[Any]) -> None:
        self.abort()

    def send(self, bucket: Bucket) -> int:
        self._tensors += [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in bucket]
        return sum(tensor.nbytes for _, tensor in bucket)

    def end(self) -> None:
        """Write the folder, have the engines load it under ``name``, compare digests of every tensor, remove it.

        Raises EngineFaultError naming the engines that refused it, or hold other tensors.
        """
        self._written = new_folder(self._transfer, "adapters")
        folder = self._written / "adapters"
        self._folder.write(folder, self._tensors, self._transfer.dtype)
        self._compare(self._transfer.engines.each(lambda e: e.load_adapter(self.name, str(folder))))
        self.abort()

    def abort(self) -> None:
        self._tensors = []
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)
            self._written = None

    def _compare(self, digests_by_url: Mapping[str, Mapping[str, str]]) -> None:
        expected = expected_digests(self._tensors, self._folder)
        compared = {
            u: verification.compare_checksums([expected], [d]) for u, d in digests_by_url.items()
        }
        faults = {u: verification.ChecksumMismatchError(m) for u, m in compared.items() if m}
        if faults:
            raise EngineFaultError(faults)
        self.loaded = len(expected) * len(digests_by_url)


def expected_digests(
    tensors: Sequence[tuple[str, Tensor]], folder: AdapterFolder
) -> dict[str, str]:
    """SHA-256 by tensor of what an engine must hold of ``tensors``, after it has fused their rows."""
    parts: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        module, _, which = name.rpartition(".")
        engine_module, part = fused_module(module)
        for fused in peft_names(f"{engine_module}.{which}", folder.shape):
            parts[fused][part] = tensor
    return {name: _digest([rows[i] for i in sorted(rows)]) for name, rows in parts.items()}


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(byte_view(tensor))
    return digest.hexdigest()


class AdapterSource(transaction.WeightSource, Protocol):
    """The trainer's adapters. ``base``: the weights that they are added to. ``folder``: what one says of them."""

    @property
    def base(self) -> transaction.WeightSource: ...

    @property
    def folder(self) -> AdapterFolder: ...


@dataclass(eq=False)
class AdapterUpdater(transaction.WeightUpdater):
    """See WeightUpdater; every update compares a digest of every tensor that was sent."""

    source: AdapterSource
    _former: int | None = field(default=None, init=False)
    _name: str = field(default="", init=False)
    _is_base_compared: bool = field(default=False, init=False)

    def attach(self, urls: Sequence[str]) -> None:
        self._is_base_compared = False
        super().attach(urls)

    def update(self, version: int) -> transaction.UpdateReport:
        report = super().update(version)
        self._is_base_compared, self._former = True, version
        return report

    # --- the transaction's parts

    def _begin(self, phases: transaction.Phases, version: int, title: str) -> float:
        self._name = adapter_name(version)
        if isinstance(self._strategy, AdapterStrategy):
            self._strategy.name = self._name
        paused = super()._begin(phases, version, title)
        # The engines keep the former version's adapters alone. A name can't stand for two.
        if self._former == version:
            self._former = None
        keep = None if self._former is None else adapter_name(self._former)
        self._conduct(phases, "begin", lambda e: e.each(lambda engine: engine.drop_adapters(keep)))
        return paused

    def _stream(
        self, phases: transaction.Phases, verify: bool
    ) -> tuple[int, int, list[Any] | None]:
        sent, received, _ = super()._stream(phases, verify=False)
        return sent, received, None if self._is_base_compared else self._hash_base(phases)

    def _hash_base(self, phases: transaction.Phases) -> list[Any] | None:
        plan = self.source.base.plan(self.config.bucket_mib * transaction.MIB, spread=False)
        expected = (
            verification.ExpectedByLayout(self._engines)
            if self._conducts and self._engines
            else None
        )
        for gathered in self.source.base.gather(plan):
            if expected is not None and gathered.tensors:
                phases.run("hash", expected.add, gathered.tensors)
        return None if expected is None else expected.partials()

    def _verify(self, phases: transaction.Phases, partials: list[Any]) -> int:
        """Compare the frozen model where it was hashed; adapters were compared when the engines loaded them."""
        loaded = self._strategy.loaded if isinstance(self._strategy, AdapterStrategy) else 0
        return loaded + (super()._verify(phases, partials) if partials else 0)

    def _commit(self, version: int, engines: Engines) -> None:
        super()._commit(version, engines)
        # Until here an engine could go back to the former version's adapters.
        try:
            engines.each(lambda engine: engine.drop_adapters(self._name))
        except EngineFaultError as error:
            log.warning("former adapters are dropped at the next update: %s", error)

    def _abort(self, phases: transaction.Phases, version: int) -> None:
        """Put the former version back in service; an engine that has none, or can't, is quarantined."""
        self._is_base_compared = False
        if self._strategy is not None:
            self._strategy.abort()
        if self._conducts and self._engines is not None:
            label = f"{UNVERIFIED_VERSION}{version}"
            try:
                self._engines.each(lambda engine: _restore(engine, self._former, label))
            except EngineFaultError as error:
                log.warning("an engine was not given its former adapters back: %s", error)

    @property
    def _adapter(self) -> str | None:
        return self._name

    def _strategy_of(self, transfer: Transfer) -> Strategy:
        return AdapterStrategy(transfer, self.source.folder)

    def _static(self) -> tuple[int, int]:
        if self._strategy is None or self._plan is None:
            return 0, 0
        elements = sum(tensor.elements for bucket in self._plan for tensor in bucket.tensors)
        return self._strategy.copies, elements * getattr(torch, self.source.dtype_name).itemsize

    def _is_due(self, check: str, every: int) -> bool:
        # ``verify_every`` does not count: adapters are always compared, and the frozen model, which doesn't change,
        # in the first update after ``attach`` or a failure.
        return check == "verify" or super()._is_due(check, every)


async def _restore(engine: EngineWeights, former: int | None, label: str) -> None:
    if not await engine.schedules(GRACE_S):
        return
    await engine.pause()
    lacks_memory = bool(engine.occupation.released)
    if lacks_memory or former is None or adapter_name(former) not in await engine.adapter_names():
        await engine.set_version(label)
        return
    await engine.drop_adapters(adapter_name(former))
    await engine.set_version(str(former))
    await engine.resume()
