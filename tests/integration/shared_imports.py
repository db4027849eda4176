"""Fork servers that a test process keeps, so that its runs import torch, Megatron-Core and SGLang once."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import psutil

from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.loading import load_config
from megatron_dppo.engine.options import ServerSections, server_environment
from megatron_dppo.engine.process import LIBRARIES
from megatron_dppo.launch.forked_ranks import libraries_of, shares_imports
from megatron_dppo.launch.local import cores_of_ranks, ranks_environment
from megatron_dppo.system.fork_server import SharedForkServers

TRAIN = "megatron_dppo.train"


@functools.cache
def _servers() -> SharedForkServers:
    """The fork servers of this process. They end with it."""
    return SharedForkServers()


def share_imports(
    config: Path, overrides: tuple[str, ...], environment: Mapping[str, str]
) -> SharedForkServers:
    """Return fork servers for a run with this configuration and environment.

    A configuration that the run will refuse needs none.
    """
    servers = _servers()
    try:
        loaded = load_config(config, overrides)
    except ConfigError:
        return servers
    sections = ServerSections.of(loaded).where_generated
    with mock.patch.dict(os.environ, environment, clear=True), open(os.devnull, "wb") as file:
        output = file.fileno()
        world_size = loaded.parallel.world_size
        if shares_imports(world_size, gpus=0):
            variables = ranks_environment(world_size, cores_of_ranks(sections))
            servers.add(libraries_of(TRAIN), variables, output)
        if sections is not None and loaded.engine.started > 0:
            servers.add([LIBRARIES], server_environment(sections), output)
    servers.wait_until_ready()
    return servers


def forks() -> list[psutil.Process]:
    """The processes that runs have forked from the fork servers."""
    found: list[psutil.Process] = []
    for pid in _servers().pids:
        try:
            found += psutil.Process(pid).children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return found
