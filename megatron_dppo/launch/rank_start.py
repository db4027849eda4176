"""The start of a process as a rank of a run, before it imports torch."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Mapping
from typing import Any

from megatron_dppo.config import ConfigError
from megatron_dppo.config.machine import (
    allocator_faults,
    set_allocator,
    set_precision,
    this_machine,
)
from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.logging import configure_logging
from megatron_dppo.system.processes import name_rank


def begin_rank(config: PolicyConfig, source: str, strategy: str | None = None) -> None:
    """Prepare this process as the rank that RANK names: its environment, its name, its log and its stacks.

    ``strategy``: ``weight_sync.strategy``; None without engines. Raises ConfigError, with the name ``source``, unless
    the launcher started as many ranks as the configuration has.
    """
    _check_world(config.parallel.world_size, source)
    prepare_environment(strategy, config.megatron)
    rank = int(os.environ["RANK"])
    name_rank(rank)
    # Configure the log before libraries are imported, so that it has their messages.
    configure_logging(config.run.directory, rank)
    # A rank that is aborted prints its stacks.
    faulthandler.enable()


def _check_world(size: int, source: str) -> None:
    """Raise ConfigError unless the launcher started as many ranks as the configuration has."""
    world = os.environ.get("WORLD_SIZE")
    if world != str(size):
        fault = f"parallel.world_size: got {size}, but the launcher set WORLD_SIZE to {world}"
        raise ConfigError([fault], source)


def prepare_environment(strategy: str | None, megatron: Mapping[str, Any]) -> None:
    """Set a rank's variables of torch and Transformer Engine.

    Raises ConfigError if the environment, for example of a container's image, has an allocator setting that
    ``strategy`` excludes.
    """
    if not this_machine().gpus:
        return
    faults = list(allocator_faults(strategy, os.environ))
    if faults:
        raise ConfigError(faults, "the environment of this rank")
    set_allocator(strategy, os.environ)
    set_precision(megatron, os.environ)
