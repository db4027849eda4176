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
from megatron_dppo.launch import forked_ranks
from megatron_dppo.model.errors import ModelError
from megatron_dppo.system.fork_server import SharedForkServers


@functools.cache
def _servers() -> SharedForkServers:
    """The fork servers of this process. They end when this process ends."""
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
    with mock.patch.dict(os.environ, environment, clear=True), open(os.devnull, "wb") as file:
        try:
            forked_ranks.share_imports(servers, loaded, file.fileno())
        except (ConfigError, ModelError):
            return servers
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
