"""Tests with real servers and runs: their time limits, and the material of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import write_material

_FACTOR = 10
"""Waits are limited by the work of the processes (``tests/patience.py``). A test's time limit is only the last resort,
so it is multiplied by this factor."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent):
            continue
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(_FACTOR * seconds), append=False)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a run of a tiny model, with the files that it names."""
    return write_material(tmp_path_factory.mktemp("material"))
