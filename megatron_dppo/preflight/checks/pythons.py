"""The interpreters of trainer and engine: versions of packages, and of NCCL, which must agree."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from megatron_dppo.preflight.checks.base import CheckError, Site
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import EVERYWHERE, Finding, odd_ones
from megatron_dppo.preflight.needs import Needs

_INSPECTION = Path(__file__).parents[1] / "inspection.py"
_TIMEOUT_S = 60.0


def collect(site: Site) -> dict[str, Any]:
    """By role: the interpreter, its version, versions of packages, NCCL's version."""
    packages = {"torch"} | {
        Requirement(line).name for lines in site.needs.requirements.values() for line in lines
    }
    told = {
        python: inspect_python(python, sorted(packages))
        for python in set(site.needs.pythons.values())
    }
    return {role: told[python] for role, python in site.needs.pythons.items()}


def inspect_python(python: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """What an interpreter tells of itself. Raises CheckError where it can't."""
    command = [python, str(_INSPECTION), *packages]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CheckError(f"{python} does not answer within {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CheckError(f"{python} fails: {last}")
    return {"python": python, **json.loads(done.stdout)}


def judge(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """The pins hold, all nodes have the same versions and kernels, and trainer and engine the same NCCL."""
    for role, requirements in needs.requirements.items():
        for host, told in evidence.items():
            for line in requirements:
                yield from _unmet(host, role, told[role]["packages"], Requirement(line))
        for package in sorted({name for t in evidence.values() for name in t[role]["packages"]}):
            versions = {h: t[role]["packages"].get(package) for h, t in evidence.items()}
            yield from odd_ones(f"{role}'s {package}", versions)
    yield from _nccl(evidence)
    kernels = {h: t["trainer"].get("fused_weight_gradients") for h, t in evidence.items()}
    yield from odd_ones("apex's kernel for weight gradients", kernels)


def _unmet(
    host: str, role: str, packages: Mapping[str, str | None], requirement: Requirement
) -> Iterator[Finding]:
    version = packages.get(requirement.name)
    what = f"{role}'s {requirement.name}"
    if version is None:
        yield Finding(host, what, "not installed", str(requirement.specifier))
    elif not requirement.specifier.contains(version, prereleases=True):
        yield Finding(host, what, version, str(requirement.specifier))


def _nccl(evidence: Mapping[str, Evidence]) -> Iterator[Finding]:
    roles = sorted({role for told in evidence.values() for role in told})
    pairs = {
        h: (t["trainer"]["nccl"], t["engine"]["nccl"]) for h, t in evidence.items() if "engine" in t
    }
    differing = {
        host: pair for host, pair in pairs.items() if None not in pair and len({*pair}) > 1
    }
    # Two environments that were installed everywhere alike: no node is better than another.
    same_everywhere = len(differing) == len(pairs) and len(set(pairs.values())) == 1
    for host, (trainer, engine) in differing.items():
        where = EVERYWHERE if same_everywhere else host
        expected = f"the trainer's {trainer}: they broadcast weights in one group"
        yield Finding(where, "engine's NCCL", str(engine), expected)
    for role in roles:
        versions = {host: told[role]["nccl"] for host, told in evidence.items() if role in told}
        yield from odd_ones(f"{role}'s NCCL", versions)
