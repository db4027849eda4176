"""Time limits of tests with real servers and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

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
