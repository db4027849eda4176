"""Weight updates that send only LoRA adapters, in the transaction of ``weights.transaction``.

The engines hold the frozen model, and apply the adapters themselves. The first update after ``attach`` or a failure
compares the frozen model tensor by tensor. The adapters of each version are a folder in PEFT's format. The engines load
this folder under the version's adapter name, and hash the tensors that they loaded. Until the commit the engines also
keep the adapters of the previous version. If the update fails, the engines serve the previous version again.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from megatron_dppo.checkpoint_conversion.adapters import AdapterFolder, peft_names
from megatron_dppo.checkpoint_conversion.tensor_store import byte_view
from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.protocol import UNVERIFIED_VERSION, adapter_name
from megatron_dppo.weights import verification
from megatron_dppo.weights.engine_weights import EngineWeights, fused_module
from megatron_dppo.weights.engines import GRACE_S, Bucket, EngineFaultError, Engines
from megatron_dppo.weights.phases import Phases
from megatron_dppo.weights.source import WeightSource
from megatron_dppo.weights.strategies import FolderStrategy
from megatron_dppo.weights.strategy import Strategy, Streamed
from megatron_dppo.weights.transaction import UpdateReport, WeightUpdater

log = logging.getLogger(__name__)


class AdapterStrategy(FolderStrategy):
    """Strategy that writes a folder of adapters on rank 0, and removes it after the engines have read it.

    Attributes:
        name: the name under which the engines load the adapters.
        compared_tensors: number of tensors compared in the last update, over all engines.
    """

    def __init__(self, source: AdapterSource, config: WeightSyncConfig) -> None:
        super().__init__(source, config)
        self._format = source.folder
        self._tensors: list[tuple[str, Tensor]] = []
        self.name = ""
        self.compared_tensors = 0

    def begin(self, meeting_points: Sequence[Any]) -> None:
        # Remove the tensors and the folder of an update that failed.
        self.abort()

    def write(self, bucket: Bucket) -> int:
        sent_bytes = 0
        for name, tensor in bucket:
            self._tensors.append((name, tensor.detach().to("cpu", copy=True)))
            sent_bytes += tensor.nbytes
        return sent_bytes

    def end(self) -> None:
        """Write a folder, have the engines load it as ``name``, compare the digest of every tensor, remove the folder.

        Raises EngineFaultError that names the engines that refused the folder, or hold other tensors.
        """
        folder = self.new_folder("adapters")
        self._format.write(folder, self._tensors, self.dtype)
        digests_by_url = self.attached.each(
            lambda engine: engine.load_adapter(self.name, str(folder))
        )
        self._compare(digests_by_url)
        self.abort()

    def abort(self) -> None:
        """Drop the gathered tensors, and remove the written folder."""
        self._tensors = []
        self.remove_folder()

    @property
    def whole_bytes(self) -> int:
        return sum(bucket.elements for bucket in self.buckets) * self.dtype.itemsize

    def _compare(self, digests_by_url: Mapping[str, Mapping[str, str]]) -> None:
        """Raise EngineFaultError that names the engines whose tensors differ from the sent tensors."""
        expected_hashes = expected_adapter_digests(self._tensors, self._format)
        faults: dict[str, BaseException] = {}
        for url, digests in digests_by_url.items():
            mismatches = verification.compare_checksums([expected_hashes], [digests])
            if mismatches:
                faults[url] = verification.ChecksumMismatchError(mismatches)
        if faults:
            raise EngineFaultError(faults)
        self.compared_tensors = len(expected_hashes) * len(digests_by_url)


def expected_adapter_digests(
    tensors: Sequence[tuple[str, Tensor]], folder: AdapterFolder
) -> dict[str, str]:
    """Return the SHA-256 of each adapter tensor that an engine holds, by name.

    An engine fuses modules, for example q, k and v, into one module with the rows of q, then k, then v.
    """
    # Name of a fused tensor -> its parts, by position.
    parts_of: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        module, _, factor = name.rpartition(".")
        engine_module, position = fused_module(module)
        for fused_name in peft_names(f"{engine_module}.{factor}", folder.shape):
            parts_of[fused_name][position] = tensor
    digests: dict[str, str] = {}
    for fused_name, parts in parts_of.items():
        digests[fused_name] = _digest([parts[position] for position in sorted(parts)])
    return digests


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(byte_view(tensor))
    return digest.hexdigest()


class AdapterSource(WeightSource, Protocol):
    """The trainer's adapters.

    Attributes:
        base: the frozen weights to which the adapters are added.
        folder: the configuration of the adapters that PEFT folders contain.
    """

    @property
    def base(self) -> WeightSource: ...

    @property
    def folder(self) -> AdapterFolder: ...


@dataclass(eq=False)
class AdapterUpdater(WeightUpdater):
    """A WeightUpdater for adapters. Every update compares the digest of every tensor that it sent."""

    source: AdapterSource
    _previous_version: int | None = field(default=None, init=False)
    _name: str = field(default="", init=False)
    _is_base_compared: bool = field(default=False, init=False)

    def attach(self, urls: Sequence[str]) -> None:
        self._is_base_compared = False
        super().attach(urls)

    def update(self, version: int) -> UpdateReport:
        report = super().update(version)
        self._is_base_compared = True
        self._previous_version = version
        return report

    def _begin(
        self, phases: Phases, version: int, title: str, compared_version: int | None
    ) -> float:
        self._name = adapter_name(version)
        if isinstance(self._strategy, AdapterStrategy):
            self._strategy.name = self._name
        paused_at = super()._begin(phases, version, title, compared_version)
        # The adapters' name has the version, and an engine cannot hold two sets of adapters with one name. So if the
        # previous version is sent again, its adapters cannot be kept during the update.
        if self._previous_version == version:
            self._previous_version = None
        previous_version = self._previous_version
        kept_name = None
        if previous_version is not None:
            kept_name = adapter_name(previous_version)
        self._on_rank_0(phases, "begin", Engines.drop_adapters, kept=kept_name)
        return paused_at

    def _stream(self, phases: Phases, verify: bool, *, sends_changes: bool) -> Streamed:
        # The adapters have no checksums in ``partials``: the strategy compares their digests.
        streamed = super()._stream(phases, verify=False, sends_changes=sends_changes)
        if self._is_base_compared:
            return streamed
        return streamed._replace(partials=self._hash_base(phases))

    def _hash_base(self, phases: Phases) -> list[Any] | None:
        """Gather and hash the frozen model on rank 0. Collective. Returns partial checksums, or None on other ranks."""
        plan = self.source.base.plan(self._transfer.bucket_bytes)
        expected_checksums = None
        if self._is_rank_0 and self._engines is not None:
            expected_checksums = verification.ExpectedByLayout(self._engines)
        for gathered in self.source.base.gather(plan):
            if expected_checksums is not None and gathered.tensors:
                phases.run("hash", expected_checksums.add, gathered.tensors)
        if expected_checksums is None:
            return None
        return expected_checksums.partials()

    def _verify(self, phases: Phases, partials: list[Any]) -> int:
        """Compare the frozen model if this update hashed it. The engines' adapters were compared at their load."""
        compared = 0
        if isinstance(self._strategy, AdapterStrategy):
            compared = self._strategy.compared_tensors
        if partials:
            compared += super()._verify(phases, partials)
        return compared

    def _commit(self, engines: Engines, version: int) -> None:
        super()._commit(engines, version)
        # Keep only the adapters of this version: no engine returns to earlier ones once the update is committed.
        try:
            engines.drop_adapters(kept=self._name)
        except EngineFaultError as error:
            log.warning("the previous adapters are dropped at the next update: %s", error)

    def _abort(self, phases: Phases, version: int) -> None:
        """Restore the previous version on every engine.

        An engine that cannot serve the previous version is quarantined. An engine that does not answer stays as it is.
        """
        self._is_base_compared = False
        self._transfer.abort()
        if self._is_rank_0 and self._engines is not None:
            previous_version = self._previous_version
            label = f"{UNVERIFIED_VERSION}{version}"
            try:
                restore = partial(_restore, previous_version=previous_version, label=label)
                self._engines.each(restore)
            except EngineFaultError as error:
                log.warning("an engine could not restore its previous adapters: %s", error)

    @property
    def _adapter(self) -> str | None:
        return self._name

    def _new_strategy(self) -> Strategy:
        return AdapterStrategy(self.source, self.config)

    def _is_due(self, check: str, period: int) -> bool:
        # ``verify_every`` has no effect here. Every update compares the adapters. The frozen model does not change, so
        # only the first update after ``attach`` or a failure compares it.
        return check == "verify" or super()._is_due(check, period)


async def _restore(engine: EngineWeights, previous_version: int | None, label: str) -> None:
    """Serve the adapters of ``previous_version`` again, or quarantine the engine with the version ``label``.

    The engine is quarantined if it does not have these adapters, or if it has released memory.
    """
    if not await engine.is_scheduling(GRACE_S):
        # The engine does not answer.
        return
    await engine.pause()
    has_released_memory = bool(engine.occupation.released)
    if has_released_memory or previous_version is None:
        await engine.set_version(label)
        return
    previous_name = adapter_name(previous_version)
    if previous_name not in await engine.adapter_names():
        await engine.set_version(label)
        return
    await engine.drop_adapters(kept=previous_name)
    await engine.set_version(str(previous_version))
    await engine.resume()
