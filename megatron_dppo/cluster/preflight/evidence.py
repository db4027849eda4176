"""What a run needs of each node, what nodes tell of themselves, how they tell each other, and what is wrong with one of
them. Needs are numbers, and lower bounds, so that no node that could work is left out.

``<run.directory>/preflight/<job>-<attempt>/<host>.json`` holds a node's evidence: an object with one entry a check.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from megatron_dppo.config.lora import adapters_of, updates_adapters
from megatron_dppo.config.machine import LEAST_OPEN_FILES
from megatron_dppo.config.schema import LoraConfig, TrainConfig
from megatron_dppo.model.adapters import trained_elements
from megatron_dppo.model.errors import ModelError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.mapping import parameters
from megatron_dppo.model.shape import ITEM_BYTES, checkpoint_bytes
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import write_atomically

_GIB = 2**30
_SHM_BYTES = _GIB // 4
"""Rings and queues of NCCL, gloo and SGLang; a container's default of 64 MiB is too small."""
_SPARE_BYTES = _GIB
_DISTRIBUTION = "megatron-dppo"


@dataclass(frozen=True)
class Needs:
    """Of one node. ``gpus``: 0 for a run without.

    ``disk_bytes``: free in ``run_directory``, which all nodes share; ``temporary_bytes``: in the node's own folder for
    temporary files; ``shm_bytes``: in ``/dev/shm``; ``memory_bytes``: of the host. ``open_files``: of one process.
    ``ports``: TCP, must be free. ``pythons``: interpreter by role, ``trainer`` and ``engine``; ``requirements``: pinned
    packages by role, as ``pip`` writes them.
    """

    gpus: int
    run_directory: Path
    disk_bytes: int
    temporary_bytes: int
    shm_bytes: int
    memory_bytes: int
    open_files: int
    ports: tuple[int, ...]
    pythons: Mapping[str, str]
    requirements: Mapping[str, tuple[str, ...]]


def needs_of(config: TrainConfig, *, gpus: int, ports: Iterable[int] = ()) -> Needs:
    """Needs of a configured run whose nodes have ``gpus`` GPUs each, 0 for a run without.

    On disk: the checkpoints to keep, and one in the making.
    """
    sync = config.weight_sync
    weights, update, checkpoint = _model_bytes(
        config.model.hf_checkpoint, config.model.dtype, config.lora
    )
    pythons, extras = {"trainer": sys.executable}, {"trainer": "gpu" if gpus else "cpu"}
    if config.engine.started and config.rollout.replay_from is None:
        pythons["engine"] = config.engine.python or sys.executable
        extras["engine"] = "gpu-engine"
    through_shm = sync.strategy == "disk" and sync.directory is None
    return Needs(
        gpus=gpus,
        run_directory=Path(config.run.directory),
        disk_bytes=_SPARE_BYTES + (config.checkpoint.keep + 1) * checkpoint,
        temporary_bytes=_SPARE_BYTES,
        shm_bytes=_SHM_BYTES + (update if through_shm else 0),
        memory_bytes=_SPARE_BYTES + weights,
        open_files=LEAST_OPEN_FILES + config.rollout.max_concurrent_requests,
        ports=tuple(ports),
        pythons=pythons,
        requirements={role: _pins(extra) for role, extra in extras.items()},
    )


def _model_bytes(folder: str, dtype: str, lora: LoraConfig) -> tuple[int, int, int]:
    try:
        shape = load_model_shape(folder)
        trained = trained_elements(shape, adapters_of(lora, shape), routers=lora.train_router)
    except ModelError:
        # No node is at fault where the model can't be read, and the check of the configuration refuses it.
        return 0, 0, 0
    weights = parameters(shape) * ITEM_BYTES[dtype]
    update = trained * ITEM_BYTES[dtype] if updates_adapters(lora) else weights
    return weights, update, checkpoint_bytes(trained, dtype)


def _pins(extra: str) -> tuple[str, ...]:
    """Requirements of an extra of this distribution that fix or bound a version, from its own metadata."""
    requirements = map(Requirement, requires(_DISTRIBUTION) or [])
    return tuple(
        f"{requirement.name}{requirement.specifier}"
        for requirement in requirements
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        and requirement.specifier
    )


Evidence = Mapping[str, Any]
"""What one check collected on one node. ``error`` in place of all else: why it could not be told."""
EVERYWHERE = "*"
"""Host of a finding that no single node is to blame for: leaving one out would not help."""
_POLL_S = 0.05


class EvidenceError(RunError, ValueError):
    """A file of evidence holds something else; the message names it."""


class CheckError(RuntimeError):
    """A node can't tell what a check asks; the message says why, and is the evidence."""


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is not as it must be: ``subject`` of ``host`` (or of ``EVERYWHERE``)."""

    host: str
    subject: str
    actual: str
    expected: str

    def __str__(self) -> str:
        where = "all nodes" if self.host == EVERYWHERE else self.host
        return f"{where}: {self.subject}: got {self.actual}, expected {self.expected}"


@dataclass(frozen=True)
class Site:
    """Where a check looks. ``evidence``: this node's, of the checks before it."""

    needs: Needs
    meeting: Meeting
    evidence: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        collect: runs on every node; evidence that JSON can hold. May raise CheckError or OSError.
        judge: pure; evidence of all nodes by host to what is wrong.
    """

    collect: Callable[[Site], dict[str, Any]]
    judge: Callable[[Mapping[str, Evidence], Needs], Iterable[Finding]]


@dataclass(frozen=True)
class Meeting:
    """One node's place among those that meet in a folder: each says something, and reads what all others said.

    No locks: new names, renames and exclusive creation are all it takes.

    Args:
        folder: seen by all nodes under this path.
        host: this node's name.
        count: nodes that take part.
        timeout_s: longest wait for the others in each round.
    """

    folder: Path
    host: str
    count: int
    timeout_s: float

    def say(self, topic: str, content: Mapping[str, Any]) -> None:
        folder = self.folder / "meeting" / topic
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / self.host, json.dumps(content))

    def hear(self, topic: str) -> dict[str, Any]:
        """What every node said on it, by host; fewer than ``count`` where the others are late."""
        deadline = time.monotonic() + self.timeout_s
        while len(self._hosts(topic)) < self.count and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.read(topic)

    def read(self, topic: str) -> dict[str, Any]:
        folder = self.folder / "meeting" / topic
        # Listed before it is read: on NFS that refreshes what this node remembers of the folder's names.
        return {host: json.loads((folder / host).read_text()) for host in self._hosts(topic)}

    def is_first(self, name: str) -> bool:
        """Whether this node was the one that created a file which must not exist before."""
        folder = self.folder / "meeting"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def _hosts(self, topic: str) -> list[str]:
        folder = self.folder / "meeting" / topic
        names = os.listdir(folder) if folder.is_dir() else []
        # A file that is being written begins with a dot.
        return sorted(name for name in names if not name.startswith("."))


def write_evidence(folder: Path, host: str, evidence: Mapping[str, Evidence]) -> None:
    write_atomically(folder / f"{host}.json", json.dumps(evidence, indent=1, sort_keys=True) + "\n")


def read_evidence(folder: Path, hosts: Iterable[str]) -> dict[str, dict[str, Evidence]]:
    """Evidence by host; a host without a file is left out. Raises EvidenceError."""
    evidence = {}
    for host in hosts:
        path = folder / f"{host}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise EvidenceError(f"{path}: not JSON: {error}") from error
        if not isinstance(content, dict):
            raise EvidenceError(f"{path}: got {type(content).__name__}, expected an object")
        evidence[host] = content
    return evidence


def too_little(
    subject: str, values: Mapping[str, int], needed: int, unit: str
) -> Iterator[Finding]:
    """One finding for each host that has less than ``needed``; ``unit``: ``GiB`` divides by 2**30."""
    for host, value in values.items():
        if value < needed:
            yield Finding(host, subject, _amount(value, unit), f"at least {_amount(needed, unit)}")


def _amount(value: int, unit: str) -> str:
    """A number with its unit; bytes as GiB or MiB, whichever reads better."""
    if unit != "GiB":
        return f"{value} {unit}"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def odd_ones(subject: str, values: Mapping[str, Any]) -> Iterator[Finding]:
    """One finding for each host whose value is not what most hosts have.

    Where two values are equally frequent, the one of the host that comes first is expected.
    """
    if not values:
        return
    texts = {host: str(value) for host, value in sorted(values.items())}
    usual, count = Counter(texts.values()).most_common(1)[0]
    for host, text in texts.items():
        if text != usual:
            yield Finding(host, subject, text, f"{usual}, as on {count} of {len(texts)} nodes")


def culprits(broken: set[frozenset[str]]) -> Iterator[tuple[str, int]]:
    """Nodes that take part in all broken pairs, most involved first, with the pairs each explains."""
    left = set(broken)
    while left:
        counts = Counter(host for pair in left for host in pair)
        # Of two nodes with as many the later name is blamed: the first node of a job runs its supervisor.
        host = max(counts, key=lambda name: (counts[name], name))
        yield host, counts[host]
        left = {pair for pair in left if host not in pair}
