"""Detection of silent memory corruption in the trainer, from hashes of its tensors.

The hashes after an optimiser step must equal the hashes before the next step, because nothing may change the tensors in
between. The hashes must also be equal on all data-parallel replicas. So the checks detect changes between optimiser
steps, and steps with different results on replicas. They cannot detect a wrong activation or gradient that reached all
replicas alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, device

from megatron_dppo.data.seal import text_digest
from megatron_dppo.system.errors import AlteredMemoryError
from megatron_dppo.system.text import first_of
from megatron_dppo.tensor_hash import Part, TiledHash, add_parts
from megatron_dppo.trainer import model
from megatron_dppo.trainer.checkpoint.state import is_replicated, state_slices
from megatron_dppo.trainer.collectives import all_gather_json

if TYPE_CHECKING:
    from megatron_dppo.model.layout import Layout
    from megatron_dppo.trainer.trainer import Trainer

SHOWN = 3
"""Number of tensors that an error message lists."""


class AlteredWeightsError(AlteredMemoryError):
    """The trainer's weights differ from the result of its last step, or between its replicas."""


class AlteredOptimizerError(AlteredMemoryError):
    """The optimizer's moments or masters changed between two steps, or differ between replicas."""


def tensor_hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the hash of each tensor, by name. One kernel hashes all tensors of a device."""
    hashes = {name: TiledHash(t.numel() * t.element_size()) for name, t in tensors.items()}
    parts_by_device: dict[device, list[Part]] = {}
    for name, tensor in tensors.items():
        parts_by_device.setdefault(tensor.device, []).append((hashes[name], tensor, 0))
    # Start the kernels of all devices before waiting for any kernel.
    pending_sums = [add_parts(parts) for parts in parts_by_device.values()]
    for finish in pending_sums:
        finish()
    return {name: hashed.hexdigest() for name, hashed in hashes.items()}


def parameter_name(chunk: int, name: str) -> str:
    """Return the name of a parameter of model chunk ``chunk`` in hashes and messages."""
    return f"{chunk}/{name}"


@dataclass(frozen=True)
class RankHashes:
    """The hashes of this rank's weights, or of its optimizer state, by name.

    ``experts``: the names of tensors of experts, whose replicas are on the expert-data-parallel ranks. The replicas of
    all other tensors are on the data-parallel (and context-parallel) ranks.
    """

    by_name: Mapping[str, str]
    experts: frozenset[str]

    def summary(self) -> list[str]:
        """Return a hash over all tensors, a hash over the dense tensors, and a hash over the experts."""
        hashes = [[name, digest] for name, digest in self.by_name.items()]
        dense = [entry for entry in hashes if entry[0] not in self.experts]
        expert = [entry for entry in hashes if entry[0] in self.experts]
        return [text_digest(hashes), text_digest(dense), text_digest(expert)]

    def changed_since(self, earlier: RankHashes) -> list[list[str]]:
        """Return [name, hash, earlier hash] of each tensor whose hash differs from the ``earlier`` one."""
        changes = []
        for name, digest in self.by_name.items():
            if digest != earlier.by_name[name]:
                changes.append([name, digest, earlier.by_name[name]])
        return changes


class MemoryChecks:
    """Hashes the trainer's weights and optimizer state, and compares the hashes.

    Every method except ``forget_optimizer`` is collective, and raises its error on every rank. The error names the
    tensors, the ranks and the step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._weights: tuple[int, RankHashes, str] | None = None
        self._optimizer: tuple[int, RankHashes] | None = None

    def remember_weights(self, step: int) -> str:
        """Hash the weights that ``step`` made, and return the hash of all ranks' weights.

        Raises AlteredWeightsError if replicas hold different weights.
        """
        hashes, summaries, digest = self._hash_weights()
        # Do not compare the hashes over all tensors: ranks that hold the same dense tensors may hold different experts.
        replica_summaries = [[dense, experts] for _, dense, experts in summaries]
        self._compare_replicas(
            AlteredWeightsError, f"weights of step {step}", hashes, replica_summaries
        )
        self._weights = step, hashes, digest
        return digest

    def check_weights(self) -> str:
        """Check that the weights have not changed since the last ``remember_weights``, and return their hash.

        Raises AlteredWeightsError.
        """
        assert self._weights is not None, "remember_weights comes first"
        step, remembered, expected = self._weights
        hashes, _, digest = self._hash_weights()
        if digest != expected:
            changes = all_gather_json(hashes.changed_since(remembered)[:SHOWN])
            raise AlteredWeightsError(
                f"the trainer's weights of step {step} changed after they were made: {_changes_text(changes)}; "
                f"{AlteredMemoryError.CONSEQUENCE}"
            )
        return digest

    def remember_optimizer(self, step: int) -> None:
        """Hash moments and masters as ``step`` left them.

        Raises AlteredOptimizerError if replicas that must hold the same state differ.
        """
        hashes = self._hash_optimizer()
        if is_replicated(self._trainer.optimizer):
            _, dense, experts = hashes.summary()
            summaries = all_gather_json([dense, experts])
            self._compare_replicas(
                AlteredOptimizerError, f"optimizer state of step {step}", hashes, summaries
            )
        self._optimizer = step, hashes

    def check_optimizer(self) -> None:
        """Check that moments and masters have not changed since the last ``remember_optimizer``.

        The method does nothing before the first ``remember_optimizer``, and after ``forget_optimizer``.

        Raises AlteredOptimizerError.
        """
        if self._optimizer is None:
            return
        step, remembered = self._optimizer
        changes = all_gather_json(self._hash_optimizer().changed_since(remembered)[:SHOWN])
        if any(changes):
            raise AlteredOptimizerError(
                f"the optimizer's state of step {step} changed after it was made: {_changes_text(changes)}; "
                f"{AlteredMemoryError.CONSEQUENCE}"
            )

    def forget_optimizer(self) -> None:
        """Drop the hashes of moments and masters, because the next step changes both. Not collective."""
        self._optimizer = None

    def _hash_weights(self) -> tuple[RankHashes, list[list[str]], str]:
        """Return this rank's hashes, the summaries of all ranks, and the hash of all ranks' weights."""
        trainer = self._trainer
        hashes = RankHashes(trainer.parameter_hashes(), _expert_names(trainer))
        summaries = all_gather_json(hashes.summary())
        rank_digests = [all_tensors for all_tensors, _, _ in summaries]
        return hashes, summaries, text_digest(rank_digests)

    def _hash_optimizer(self) -> RankHashes:
        """Return the hashes of this rank's moments and masters."""
        trainer = self._trainer
        trainer.check_resident("hash the optimizer's state", "optimizer")
        names: dict[int, str] = {}
        for (chunk, name), parameter in model.named_parameters(trainer.chunks).items():
            names[id(parameter)] = parameter_name(chunk, name)
        tensors: dict[str, Tensor] = {}
        experts = set()
        for state in state_slices(trainer.optimizer):
            for state_name, values in state.tensors.items():
                name = f"{state_name} of {names[id(state.parameter)]} from element {state.start}"
                tensors[name] = values
                if _is_expert(state.parameter):
                    experts.add(name)
        return RankHashes(tensor_hashes(tensors), frozenset(experts))

    def _compare_replicas(
        self,
        error: type[AlteredMemoryError],
        subject: str,
        hashes: RankHashes,
        summaries: Sequence[Sequence[str]],
    ) -> None:
        """Raise ``error`` on every rank if the ranks of a replica group have different ``hashes``.

        ``subject``: the hashed tensors, for the message. ``summaries``: for each rank, the hash over its dense tensors
        and the hash over its experts.
        """
        groups = differing_groups(self._trainer.layout, summaries)
        if not groups:
            return
        rank = self._trainer.topology.rank
        # A rank may have thousands of hashes: only ranks of groups with differences send them.
        sent_hashes: list[Any] = [{}, []]
        if any(rank in ranks for _, ranks in groups):
            sent_hashes = [dict(hashes.by_name), sorted(hashes.experts)]
        gathered = all_gather_json(sent_hashes)
        faults: list[str] = []
        for is_expert, ranks in groups:
            faults += replica_faults(is_expert, ranks, gathered)
        raise error(
            f"the trainer's replicas have different {subject}: {first_of(faults, SHOWN)}; "
            f"{AlteredMemoryError.CONSEQUENCE}"
        )


def replica_groups(layout: Layout) -> list[tuple[bool, list[int]]]:
    """Return (is_expert, ranks) of each group of ranks that hold the same tensors.

    ``is_expert``: True for the groups of the experts' tensors, False for the groups of all other tensors.
    """
    groups: dict[Hashable, list[int]] = {}
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        groups.setdefault((False, place.tp, place.pp), []).append(rank)
        groups.setdefault((True, place.etp, place.ep, place.pp), []).append(rank)
    return [(bool(key[0]), ranks) for key, ranks in groups.items()]  # type: ignore[index]


def differing_groups(
    layout: Layout, summaries: Sequence[Sequence[str]]
) -> list[tuple[bool, list[int]]]:
    """Return the groups of ``replica_groups`` whose ranks have different hashes.

    ``summaries``: for each rank, the hash over its dense tensors and the hash over its experts.
    """
    groups: list[tuple[bool, list[int]]] = []
    for is_expert, ranks in replica_groups(layout):
        hashes = {summaries[rank][int(is_expert)] for rank in ranks}
        if len(hashes) > 1:
            groups.append((is_expert, ranks))
    return groups


def replica_faults(
    is_expert: bool, ranks: Sequence[int], gathered: Sequence[Sequence[Any]]
) -> list[str]:
    """Return a text for each tensor whose hash differs among the ``ranks`` of a replica group.

    If most ranks have one hash, the text names the ranks with another hash. Otherwise it names all ranks.
    ``gathered``: for each rank, its hashes by tensor name, and the names of the tensors of experts.
    """
    faults = []
    names, experts = gathered[ranks[0]]
    for name in names:
        if (name in experts) != is_expert:
            continue
        digests = {rank: gathered[rank][0].get(name, "none") for rank in ranks}
        common_digest, count = Counter(digests.values()).most_common(1)[0]
        if count == len(ranks):
            continue
        if 2 * count > len(ranks):
            suspects = [rank for rank, digest in digests.items() if digest != common_digest]
            faults.append(
                f"{name} on {_ranks_text(suspects)} has the hash {digests[suspects[0]]}, expected {common_digest}, "
                f"which {count} of {len(ranks)} replicas have"
            )
        else:
            sides = ", ".join(f"{digest} on rank {rank}" for rank, digest in digests.items())
            faults.append(f"{name} has the hash {sides}")
    return faults


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _changes_text(changes_by_rank: Iterable[Sequence[Sequence[str]]]) -> str:
    """Describe the changes of each rank: [name, hash, expected hash] of each changed tensor."""
    texts = []
    for rank, changes in enumerate(changes_by_rank):
        for name, digest, expected in changes:
            texts.append(f"{name} on rank {rank} has the hash {digest}, expected {expected}")
    return first_of(texts, SHOWN)


def _is_expert(parameter: Any) -> bool:
    # Megatron marks expert parameters by allreduce=False: the expert-data-parallel ranks hold their replicas.
    return not getattr(parameter, "allreduce", True)


def _expert_names(trainer: Trainer) -> frozenset[str]:
    parameters = model.named_parameters(trainer.chunks).items()
    return frozenset(
        parameter_name(chunk, name) for (chunk, name), p in parameters if _is_expert(p)
    )
