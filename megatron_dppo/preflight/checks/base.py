"""What a check is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import Finding
from megatron_dppo.preflight.meeting import Meeting
from megatron_dppo.preflight.needs import Needs


class CheckError(RuntimeError):
    """A node can't tell what a check asks; the message says why, and is the evidence."""


@dataclass(frozen=True)
class Site:
    """Where a check looks. ``told``: the evidence of the checks before it."""

    needs: Needs
    meeting: Meeting
    told: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        collect: runs on every node; evidence that JSON can hold. May raise CheckError or OSError.
        judge: pure; evidence of all nodes by host to what is wrong.
    """

    collect: Callable[[Site], dict[str, Any]]
    judge: Callable[[Mapping[str, Evidence], Needs], Iterable[Finding]]
