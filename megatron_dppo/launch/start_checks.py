"""Start checks: whether a run can start on one machine. They run before any process of the run starts.

Packages register checks under the entry-point group ``megatron_dppo.start_checks`` (``system/plugins.py``). This
package's own checks compare the run's memory with the machine's memory, and compile a kernel if a server runs on GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dppo.config import TrainConfig
from megatron_dppo.config.checks import services_of
from megatron_dppo.config.machine import Machine, allocator_faults
from megatron_dppo.launch.local import local_placement
from megatron_dppo.launch.machine_checks import machine_faults
from megatron_dppo.launch.placement import PlacementError
from megatron_dppo.spec import Roles
from megatron_dppo.system import plugins


@dataclass(frozen=True)
class StartCheck:
    """The result of one start check.

    Attributes:
        faults: reasons why the run cannot start on the machine, one line each.
        summary: a line that ``megatron-dppo train --check`` prints; empty if there is nothing to say.
    """

    faults: Sequence[str] = ()
    summary: str = ""


StartChecker = Callable[[TrainConfig, Machine], StartCheck]


def check_start(config: TrainConfig, machine: Machine) -> StartCheck:
    """Run every start check of ``config`` on ``machine``.

    Returns:
        The faults of the machine, of the registered checks (also if one cannot be imported), of servers that do not
        answer and of the placement of processes; the summaries of all checks, one line each.

    Raises:
        ValueError: a registered check returns something else than a StartCheck.
    """
    roles = Roles.of(config)
    faults = list(machine_faults(config, roles, machine))
    summaries = []
    checks, plugin_faults = plugins.sound_plugins(plugins.START_CHECKS)
    faults += plugin_faults
    for name, entry in checks.items():
        try:
            checker: StartChecker = plugins.load_plugin(entry)
        except plugins.PluginError as error:
            faults.append(str(error))
            continue
        result = checker(config, machine)
        if not isinstance(result, StartCheck):
            raise ValueError(
                f"start check {name!r} ({entry.value}): got {type(result).__name__}, expected a StartCheck"
            )
        faults += result.faults
        if result.summary:
            summaries.append(result.summary)
    if machine.gpus:
        faults += allocator_faults(config.weight_sync.strategy, os.environ)
    if services_of(config):
        # Import lazily: the supervisor stays small.
        from megatron_dppo.environments.over_http import absent_services

        faults += absent_services(config)
    try:
        local_placement(config, roles, machine)
    except PlacementError as error:
        faults.append(str(error))
    return StartCheck(faults, "\n".join(summaries))
