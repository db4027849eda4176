"""Requirements of a run on each node, evidence of the nodes, exchange between nodes, and findings about the evidence.

Requirements are lower bounds, so that a node that could work is never left out.

``<run.directory>/preflight/<job>-<attempt>/<host>.json`` holds a node's evidence: an object with one entry for each
check.
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

from megatron_dppo.cluster.planner.devices import GIB, MIB, gib
from megatron_dppo.cluster.planner.facts import facts_of
from megatron_dppo.cluster.planner.traffic import checkpoint_bytes, sent_bytes
from megatron_dppo.config import ConfigError
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.launch.machine_checks import least_open_files
from megatron_dppo.model.errors import ModelError
from megatron_dppo.model.mapping import parameter_count
from megatron_dppo.spec import Roles
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import write_atomically
from megatron_dppo.system.scratch import SHARED_MEMORY

_SHM_BYTES = GIB // 4
"""Shared memory for rings and queues of NCCL, gloo and SGLang; a container's default of 64 MiB is too small."""
_SPARE_BYTES = GIB
"""Free bytes of disk and memory that every run needs in addition to the model's bytes."""
_DISTRIBUTION = "megatron-dppo"


@dataclass(frozen=True)
class Needs:
    """Requirements on one node.

    Attributes:
        gpus: number of GPUs; 0 for a run on CPUs.
        run_directory: the run's folder. All nodes share this folder.
        disk_bytes: free bytes in ``run_directory``.
        temporary_bytes: free bytes in the node's own folder for temporary files.
        shm_bytes: free bytes in ``/dev/shm``.
        memory_bytes: available bytes of the host's memory.
        open_files: number of files that one process may open.
        ports: TCP ports that must be free.
        pythons: interpreter by role, ``trainer`` and ``engine``.
        requirements: pinned packages by role, as pip's requirement specifiers.
        memory_saver: whether servers release their GPUs' memory, for which SGLang preloads a library.
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
    memory_saver: bool = False


def needs_of(config: TrainConfig, *, gpus: int, ports: Iterable[int] = ()) -> Needs:
    """Return the requirements of a configured run whose nodes have ``gpus`` GPUs each, 0 for a run on CPUs.

    The disk must hold the checkpoints to keep, and one checkpoint that is being written.
    """
    update_folder = config.weight_sync.update_folder
    weight_bytes, update_bytes, checkpoint_size = _model_bytes(config)
    pythons = {"trainer": sys.executable}
    extras = {"trainer": "gpu" if gpus else "cpu"}
    if Roles.of(config).servers:
        pythons["engine"] = config.engine.python or sys.executable
        extras["engine"] = "gpu-engine"
    shm_bytes = _SHM_BYTES
    if update_folder is not None and update_folder.is_relative_to(SHARED_MEMORY):
        shm_bytes += update_bytes
    return Needs(
        gpus=gpus,
        run_directory=Path(config.run.directory),
        disk_bytes=_SPARE_BYTES + (config.checkpoint.keep + 1) * checkpoint_size,
        temporary_bytes=_SPARE_BYTES,
        shm_bytes=shm_bytes,
        memory_bytes=_SPARE_BYTES + weight_bytes,
        open_files=least_open_files(config.rollout),
        ports=tuple(ports),
        pythons=pythons,
        requirements={role: _pins(extra) for role, extra in extras.items()},
        memory_saver=config.engine.placement == "colocated",
    )


def _model_bytes(config: TrainConfig) -> tuple[int, int, int]:
    """Return the bytes of the model's weights, of a weight update, and of a checkpoint."""
    try:
        facts = facts_of(config, config.model.read_shape())
    except (ConfigError, ModelError):
        # A model that can't be read is no node's fault. The check of the configuration refuses such a model.
        return 0, 0, 0
    weight_bytes = parameter_count(facts.trainer.shape) * facts.trainer.item_bytes
    return weight_bytes, sent_bytes(facts), checkpoint_bytes(facts)


def _pins(extra: str) -> tuple[str, ...]:
    """Return the requirements of this distribution's ``extra`` that fix or bound a version."""
    pins = []
    for requirement in map(Requirement, requires(_DISTRIBUTION) or []):
        # In the distribution's metadata, a marker such as ``extra == "gpu"`` makes a requirement part of an extra.
        marker = requirement.marker
        is_of_extra = marker is not None and marker.evaluate({"extra": extra})
        if is_of_extra and requirement.specifier:
            pins.append(f"{requirement.name}{requirement.specifier}")
    return tuple(pins)


Evidence = Mapping[str, Any]
"""The values that one check collected on one node. If the check failed, the only key is ``error``, with the reason."""
EvidenceByHost = Mapping[str, Evidence]
"""The evidence of one check, by host."""
EVERYWHERE = "*"
"""Host of a finding that no single node causes, so that leaving out nodes would not help."""
_POLL_S = 0.05


class EvidenceError(RunError, ValueError):
    """A file of evidence is not JSON, or no JSON object; the message names the file."""


class CheckError(RuntimeError):
    """A node can't collect a check's values. The message gives the reason, and becomes the evidence's ``error``."""


@dataclass(frozen=True, order=True)
class Finding:
    """One fault: ``subject`` of ``host`` (or of ``EVERYWHERE``), with the actual and the expected value."""

    host: str
    subject: str
    actual: str
    expected: str

    def __str__(self) -> str:
        host_name = "all nodes"
        if self.host != EVERYWHERE:
            host_name = self.host
        return f"{host_name}: {self.subject}: got {self.actual}, expected {self.expected}"


@dataclass(frozen=True)
class Site:
    """The context of a check on a node.

    Attributes:
        needs: requirements on the node.
        meeting: exchange with the other nodes.
        evidence: this node's evidence from the earlier checks.
    """

    needs: Needs
    meeting: Meeting
    evidence: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        collect: runs on every node and returns evidence that JSON can hold. May raise CheckError or OSError.
        judge: a pure function from the evidence of all nodes, by host, to findings.
    """

    collect: Callable[[Site], dict[str, Any]]
    judge: Callable[[EvidenceByHost, Needs], Iterable[Finding]]


@dataclass(frozen=True)
class Meeting:
    """Exchange between nodes by files in a folder: each node writes a file on a topic, and reads all nodes' files.

    The exchange needs no locks. Each node writes only the files with its own name. A file gets this name by a rename,
    when it is complete. ``is_first`` relies on exclusive creation.

    Args:
        folder: folder that all nodes see under this path.
        host: this node's name.
        count: number of nodes that take part.
        timeout_s: longest wait for the other nodes in each round.
    """

    folder: Path
    host: str
    count: int
    timeout_s: float

    def write(self, topic: str, content: Mapping[str, Any]) -> None:
        """Write or replace this node's content on a topic."""
        folder = self.folder / "meeting" / topic
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / self.host, json.dumps(content))

    def wait_for_all(self, topic: str) -> dict[str, Any]:
        """Wait until every node has written on the topic, at most ``timeout_s``; return the contents by host."""
        return self.wait_until(topic, lambda contents: len(contents) >= self.count)

    def wait_until(
        self, topic: str, is_complete: Callable[[Mapping[str, Any]], bool]
    ) -> dict[str, Any]:
        """Wait until the contents on the topic are complete, at most ``timeout_s``; return them by host."""
        deadline = time.monotonic() + self.timeout_s
        while not is_complete(contents := self.read(topic)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return contents

    def read(self, topic: str) -> dict[str, Any]:
        """Return what the nodes have written on the topic so far, by host."""
        folder = self.folder / "meeting" / topic
        # List the folder before reading: on NFS, listing refreshes this node's cache of the names.
        return {host: json.loads((folder / host).read_bytes()) for host in self._hosts(topic)}

    def is_first(self, name: str) -> bool:
        """Create the file ``name`` exclusively; return whether this node is the first to create it."""
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
        # The name of a file that is being written begins with a dot.
        return sorted(name for name in names if not name.startswith("."))


def write_evidence(folder: Path, host: str, evidence: Mapping[str, Evidence]) -> None:
    write_atomically(folder / f"{host}.json", json.dumps(evidence, indent=1, sort_keys=True) + "\n")


def read_evidence(folder: Path, hosts: Iterable[str]) -> dict[str, dict[str, Evidence]]:
    """Read evidence by host; a host without a file is left out. Raises EvidenceError."""
    evidence = {}
    for host in hosts:
        path = folder / f"{host}.json"
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise EvidenceError(f"{path}: not JSON: {error}") from error
        if not isinstance(content, dict):
            raise EvidenceError(f"{path}: got {type(content).__name__}, expected an object")
        evidence[host] = content
    return evidence


def too_little(
    subject: str, values: Mapping[str, int], required: int, unit: str
) -> Iterator[Finding]:
    """Yield a finding for each host that has less than ``required``. With the unit ``GiB``, values are bytes."""
    expectation = f"at least {_amount(required, unit)}"
    for host, value in values.items():
        if value < required:
            yield Finding(host, subject, _amount(value, unit), expectation)


def _amount(value: int, unit: str) -> str:
    """Format a number with its unit; bytes as GiB or MiB, whichever is more readable."""
    if unit != "GiB":
        return f"{value} {unit}"
    if value >= GIB:
        return gib(value)
    return f"{value / MIB:.0f} MiB"


def outlier_findings(subject: str, values: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each host whose value differs from the most frequent value.

    If several values are equally frequent, the expected value is the first of them in the order of host names.
    """
    if not values:
        return
    texts = {host: str(value) for host, value in sorted(values.items())}
    usual_text, count = Counter(texts.values()).most_common(1)[0]
    expectation = f"{usual_text}, as on {count} of {len(texts)} nodes"
    for host, text in texts.items():
        if text != usual_text:
            yield Finding(host, subject, text, expectation)


def culprits(broken: set[frozenset[str]]) -> Iterator[tuple[str, int]]:
    """Yield nodes that explain all broken pairs, each with the number of further pairs that it explains.

    The choice is greedy: each next node is the node with the most remaining pairs.
    """
    unexplained_pairs = set(broken)
    while unexplained_pairs:
        counts: Counter[str] = Counter()
        for pair in unexplained_pairs:
            counts.update(pair)
        # Of nodes with equal counts, blame the last by name: the first node of a job runs its supervisor.
        most = max(counts.values())
        host = max(name for name, count in counts.items() if count == most)
        yield host, most
        unexplained_pairs = {pair for pair in unexplained_pairs if host not in pair}
