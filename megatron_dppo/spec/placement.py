"""The processes of a run and the devices that they share. ``launch/placement.py`` assigns them to hosts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.config.schema import PolicyConfig, TrainConfig
from megatron_dppo.model.engine_layout import server_ranks


@dataclass(frozen=True)
class TeacherRole:
    """The servers of a teacher that the run starts: their number, and the devices of each."""

    name: str
    servers: int
    server_devices: int = 1


@dataclass(frozen=True)
class Roles:
    """The processes of a run: ranks, one device each, and SGLang servers to start.

    Attributes:
        ranks, servers: number of ranks and of servers. A run that replays saved batches starts no server.
        server_devices: number of devices of each server.
        first_device: first device of the first server, counted over all hosts; None: the device after the ranks.
        port: port of the first server; None if the configuration has no port.
        router: whether the run has an HTTP router.
        colocated: whether ranks and servers take turns on the same devices.
        generating: number of servers that generate while the ranks train.
        teachers: the teachers with servers to start. Their devices follow those of ranks and servers.
    """

    ranks: int
    servers: int = 0
    server_devices: int = 1
    first_device: int | None = None
    port: int | None = None
    router: bool = False
    colocated: bool = False
    generating: int = 0
    teachers: tuple[TeacherRole, ...] = ()

    @classmethod
    def of(cls, config: PolicyConfig) -> Roles:
        """Return the roles of a run. They do not depend on the model. A supervised run has ranks alone."""
        ranks = config.parallel.world_size
        if not isinstance(config, TrainConfig) or config.rollout.replays:
            return cls(ranks)
        engine = config.engine
        servers = engine.servers_to_start
        colocated = engine.placement == "colocated"
        teachers = [
            TeacherRole(name, teacher.servers_to_start, server_ranks(teacher.sglang))
            for name, teacher in config.distillation.teachers.items()
            if teacher.servers_to_start
        ]
        return cls(
            ranks,
            servers,
            server_devices=server_ranks(config.sglang),
            first_device=0 if colocated else config.sglang.get("base_gpu_id"),
            port=engine.port,
            router=engine.uses_router,
            colocated=colocated,
            generating=servers if config.overlaps else 0,
            teachers=tuple(teachers),
        )

    @property
    def first_server_device(self) -> int:
        """First device of the first server, counted over all hosts."""
        if self.first_device is None:
            return self.ranks
        return self.first_device

    @property
    def teacher_servers(self) -> int:
        """Number of all teachers' servers."""
        return sum(teacher.servers for teacher in self.teachers)
