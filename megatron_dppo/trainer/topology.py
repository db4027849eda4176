"""Position of a rank in the parallel layout, its process groups, and their initialisation."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from megatron_dppo.model.layout import Layout
from megatron_dppo.system import interfaces, network
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.megatron_config import megatron_sizes
from megatron_dppo.trainer.watchdog import LONGEST_WAIT_S, Watchdog, client_of

log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(seconds=LONGEST_WAIT_S)
"""torch's own limit, the last resort: the supervisor detects a dead rank, and the watchdog a hung one."""
_CONNECT_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True)
class Topology:
    """Coordinates and process groups of this rank.

    Sizes and ranks: DP data-parallel, TP tensor-parallel, CP context-parallel, PP pipeline-parallel.

    Attributes:
        leaders: global rank of each replica's leader (TP 0, CP 0, PP 0), by data-parallel rank.
        data_group: the ranks of all replicas with this rank's coordinates in TP, CP and PP.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    pp_rank: int
    pp_size: int
    leaders: tuple[int, ...]
    data_group: ProcessGroup = field(repr=False)
    tensor_group: ProcessGroup = field(repr=False)
    context_group: ProcessGroup = field(repr=False)
    pipeline_group: ProcessGroup = field(repr=False)

    @property
    def is_leader(self) -> bool:
        """Whether this rank requests and scores the rollouts of its replica."""
        return self.is_first_of_stage and self.pp_rank == 0

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank is the first of its replica's ranks in its pipeline stage.

        All ranks of a replica in the last stage have equal statistics, so the first rank can report for all.
        """
        return self.tp_rank == 0 and self.cp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.pp_rank == self.pp_size - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage in this rank's pipeline."""
        return dist.get_global_rank(self.pipeline_group, self.pp_size - 1)


def init_distributed(
    world_size: int, interface: str | None = None, limit_s: float = LONGEST_WAIT_S
) -> None:
    """Join the process group given by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Without RANK, the group has only this process.

    Args:
        world_size: number of ranks.
        interface: network interface of all sockets that listen. None: the rendezvous listens on MASTER_ADDR, and gloo
            and NCCL choose an interface themselves. But if MASTER_ADDR is loopback and all ranks are on this machine,
            gloo listens on loopback.
        limit_s: time limit of a collective in seconds. A longer collective ends this process with a report.

    Raises:
        ValueError: WORLD_SIZE is not ``world_size``.
        InterfaceError: this machine lacks the interface.
    """
    given_size = int(os.environ.get("WORLD_SIZE", "1"))
    if given_size != world_size:
        raise ValueError(f"WORLD_SIZE is {given_size}, but parallel.world_size is {world_size}")
    if dist.is_initialized():
        return
    backend = platform.current().distributed_backend
    if os.environ.get("RANK", "0") == "0":
        for line in platform.environment_lines():
            log.info("environment: %s", line)
    if "RANK" in os.environ:
        _name_interface(interface)
        rank = int(os.environ["RANK"])
        store = _store(given_size, interface)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=given_size, timeout=COLLECTIVE_TIMEOUT
        )
        if given_size > 1:
            host = os.environ["MASTER_ADDR"]
            port = int(os.environ["MASTER_PORT"])
            Watchdog(rank, limit_s, client_of(host, port, _CONNECT_TIMEOUT)).start()
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _name_interface(interface: str | None) -> None:
    """Set the variables from which gloo and NCCL read the interface, for all groups of this process."""
    if interface is not None:
        # ``interface`` may be an address, but the variables need a name.
        name = interfaces.interface_of(interfaces.interface_address(interface)) or interface
        os.environ["GLOO_SOCKET_IFNAME"] = name
        os.environ["NCCL_SOCKET_IFNAME"] = name
    elif network.is_loopback(os.environ["MASTER_ADDR"]) and _on_one_host():
        loopback = interfaces.interface_of(network.resolve(os.environ["MASTER_ADDR"]))
        if loopback is not None:
            # By default gloo would listen on the address of the machine's name. Other machines may reach this address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _store(world_size: int, interface: str | None) -> dist.Store:
    """Connect to the rendezvous at MASTER_ADDR. Rank 0 hosts the rendezvous unless torchrun hosts it."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ["RANK"] != "0" or is_hosted_by_torchrun:
        return dist.TCPStore(host, port, world_size, False, COLLECTIVE_TIMEOUT)
    address = host
    if interface is not None:
        address = interfaces.interface_address(interface)
    # The name of a machine may resolve to its loopback address, but other machines cannot reach this address.
    if network.is_loopback(address) and not _on_one_host():
        log.warning(
            "the ranks' rendezvous listens on every interface: MASTER_ADDR, %s, is loopback here; "
            "name a network interface in parallel.interface",
            host,
        )
        return dist.TCPStore(host, port, world_size, True, COLLECTIVE_TIMEOUT)
    return network.listening_store(address, port, world_size, COLLECTIVE_TIMEOUT)


def ranks_per_node() -> int:
    """Return the number of ranks on each machine, from the launcher's variables; a machine has consecutive ranks."""
    world = os.environ.get("WORLD_SIZE", "1")
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _on_one_host() -> bool:
    """Return whether all ranks are on this machine, by the launcher's variables."""
    return ranks_per_node() == int(os.environ["WORLD_SIZE"])


def init_topology(layout: Layout) -> Topology:
    """Create Megatron's process groups for ``layout``. Collective."""
    parallel_state.initialize_model_parallel(
        **megatron_sizes(layout),
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
        # Create no gloo groups: nothing here uses them, and each group opens connections between all its ranks.
        create_gloo_process_groups=False,
    )
    leaders: list[int] = []
    for other_rank in range(layout.world_size):
        other = layout.coordinates(other_rank)
        if other.tp == 0 and other.cp == 0 and other.pp == 0:
            leaders.append(other.rank)
    coordinates = layout.coordinates(dist.get_rank())
    return Topology(
        rank=coordinates.rank,
        world_size=layout.world_size,
        dp_rank=coordinates.dp,
        dp_size=layout.data,
        tp_rank=coordinates.tp,
        tp_size=layout.tensor,
        cp_rank=coordinates.cp,
        cp_size=layout.context,
        pp_rank=coordinates.pp,
        pp_size=layout.pipeline,
        leaders=tuple(leaders),
        data_group=parallel_state.get_data_parallel_group(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        context_group=parallel_state.get_context_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
    )


def destroy_topology() -> None:
    """Reset Megatron's process groups, so that this process can create another layout."""
    parallel_state.destroy_model_parallel()
