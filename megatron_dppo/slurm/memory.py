"""What the planner says of a submission: whether its memory suffices."""

from __future__ import annotations

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.planner.devices import DEVICES, GIB, Cluster
from megatron_dppo.slurm.site import SiteConfig

_UNKNOWN = "memory: not planned, as the site file's gpu names none of {names}"


def memory_verdict(config: TrainConfig, site: SiteConfig, nodes: int) -> tuple[str, list[str]]:
    """A line for people, and what speaks against the run.

    ``config`` must have passed its checks. Nothing is planned where the site does not name its GPUs, or
    has none.
    """
    if not site.gpus_per_node:
        return "memory: not planned, the nodes have no GPUs", []
    if site.gpu is None:
        return _UNKNOWN.format(names=", ".join(DEVICES)), []
    from megatron_dppo.planner.facts import job_of  # loads numpy
    from megatron_dppo.planner.run_plan import verdict

    device = DEVICES[site.gpu]
    memory = device.host_memory if site.host_memory_gib is None else site.host_memory_gib * GIB
    cluster = Cluster(device, nodes, site.gpus_per_node, memory)
    shape = load_model_shape(config.model.hf_checkpoint)
    plan = verdict(job_of(config, shape), cluster)
    rank = plan.fullest.total / GIB
    fits = "fits" if plan.fits else "does not fit"
    line = (
        f"memory: {fits} on {nodes} x {site.gpus_per_node} {device.name}; the fullest rank takes "
        f"{rank:.1f} GiB; {plan.memory_limit}"
    )
    return line, list(plan.problems)
