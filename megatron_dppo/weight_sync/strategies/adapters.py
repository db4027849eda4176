"""Adapters alone, as a folder in PEFT's format that the engines' own LoRA reads; what they loaded is hashed there.

Of strategy ``disk``, where ``lora.update`` is ``adapters``. The engines keep the adapters of the version before: they
answer with either, by name, until the update is committed.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.checkpoint_conversion.peft import AdapterFolder, peft_names
from megatron_dppo.engine.adapters import engine_place, load_adapter
from megatron_dppo.system.scratch import private_name
from megatron_dppo.weight_sync.interfaces import Bucket, EngineFaultError, Transfer
from megatron_dppo.weight_sync.strategies.disk import MEMORY, require_shared_folder
from megatron_dppo.weight_sync.verification import ChecksumMismatchError, compare_checksums


class AdapterStrategy:
    """See ``interfaces.Strategy``; rank 0 writes all. The folder is removed when the engines have read it.

    ``folder``: what it says of the adapters. ``name``: what the engines are to call them. ``loaded``: how many
    tensors were compared in the last update, over all engines. Raises EngineMismatchError as ``DiskStrategy``.
    """

    spread = False
    copies = 1

    def __init__(self, transfer: Transfer, folder: AdapterFolder) -> None:
        require_shared_folder(transfer)
        self._transfer = transfer
        self._folder = folder
        self._tensors: list[tuple[str, Tensor]] = []
        self._place: Path | None = None
        self.name = ""
        self.loaded = 0

    def meeting_point(self) -> Any:
        """None: the ranks need not know each other."""
        return None

    def begin(self, meeting_points: Sequence[Any]) -> None:
        """Forget what a failed update left."""
        self.abort()

    def send(self, bucket: Bucket) -> int:
        """Keep a copy of the bucket: a folder of adapters is written at once."""
        self._tensors += [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in bucket]
        return sum(tensor.nbytes for _, tensor in bucket)

    def arrive(self) -> None:
        """All is there when ``send`` returns."""

    def end(self) -> None:
        """Write the folder, have the engines load it under ``name``, compare digests of every tensor, remove it.

        Raises EngineFaultError naming the engines that refused it, or hold other tensors.
        """
        where = self._transfer.directory or MEMORY
        Path(where).mkdir(parents=True, exist_ok=True)
        self._place = Path(tempfile.mkdtemp(prefix=f"{private_name()}adapters-", dir=where))
        folder = self._place / "adapters"
        self._folder.write(folder, self._tensors, self._transfer.dtype)
        load = partial(load_adapter, name=self.name, folder=str(folder))
        self._compare(self._transfer.engines.each(load))
        self.abort()

    def abort(self) -> None:
        """Remove what was written."""
        self._tensors = []
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place = None

    def close(self) -> None:
        """As ``abort``."""
        self.abort()

    def _compare(self, held: Mapping[str, Mapping[str, str]]) -> None:
        expected = expected_digests(self._tensors, self._folder)
        found = {url: compare_checksums([expected], [digests]) for url, digests in held.items()}
        if any(found.values()):
            raise EngineFaultError({u: ChecksumMismatchError(m) for u, m in found.items() if m})
        self.loaded = len(expected) * len(held)


def expected_digests(
    tensors: Sequence[tuple[str, Tensor]], folder: AdapterFolder
) -> dict[str, str]:
    """SHA-256 by tensor of what an engine must hold of ``tensors``, after it has fused their rows."""
    parts: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in tensors:
        module, _, which = name.rpartition(".")
        held_in, place = engine_place(module)
        for fused in peft_names(f"{held_in}.{which}", folder.shape):
            parts[fused][place] = tensor
    return {name: _digest([held[i] for i in sorted(held)]) for name, held in parts.items()}


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
