"""The interpreters of trainer and engine: versions of packages, and of NCCL, which must agree."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from megatron_dppo.preflight.evidence import (
    EVERYWHERE,
    CheckError,
    Evidence,
    Finding,
    Site,
    odd_ones,
)
from megatron_dppo.preflight.needs import Needs

_INSPECTION = Path(__file__).with_name("inspection.py")
_TIMEOUT_S = 60.0


def collect_pythons(site: Site) -> dict[str, Any]:
    pins = [line for lines in site.needs.requirements.values() for line in lines]
    packages = sorted({"torch", *(Requirement(line).name for line in pins)})
    pythons = site.needs.pythons
    # Trainer and engine often share an interpreter, which is asked once.
    answers = {python: inspect_python(python, packages) for python in set(pythons.values())}
    return {role: answers[python] for role, python in pythons.items()}


def inspect_python(python: str, packages: Sequence[str] = ()) -> dict[str, Any]:
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


def judge_pythons(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """The pins hold, all nodes have the same versions and kernels, and trainer and engine the same NCCL."""
    for role, requirements in needs.requirements.items():
        packages = {host: roles[role]["packages"] for host, roles in evidence.items()}
        for host, versions in packages.items():
            for line in requirements:
                yield from _unmet(host, role, versions, Requirement(line))
        for name in sorted({name for versions in packages.values() for name in versions}):
            of_hosts = {host: versions.get(name) for host, versions in packages.items()}
            yield from odd_ones(f"{role}'s {name}", of_hosts)
    yield from _nccl(evidence)
    kernels = {h: roles["trainer"].get("fused_weight_gradients") for h, roles in evidence.items()}
    yield from odd_ones("apex's kernel for weight gradients", kernels)


def _unmet(
    host: str, role: str, versions: Mapping[str, str | None], requirement: Requirement
) -> Iterator[Finding]:
    version = versions.get(requirement.name)
    subject, expected = f"{role}'s {requirement.name}", str(requirement.specifier)
    if version is None:
        yield Finding(host, subject, "not installed", expected)
    elif not requirement.specifier.contains(version, prereleases=True):
        yield Finding(host, subject, version, expected)


def _nccl(evidence: Mapping[str, Evidence]) -> Iterator[Finding]:
    pairs = {
        host: (roles["trainer"]["nccl"], roles["engine"]["nccl"])
        for host, roles in evidence.items()
        if "engine" in roles
    }
    differing = {h: pair for h, pair in pairs.items() if None not in pair and len({*pair}) > 1}
    # Two environments that were installed everywhere alike: no node is better than another.
    same_everywhere = len(differing) == len(pairs) and len(set(pairs.values())) == 1
    for host, (trainer, engine) in differing.items():
        where = EVERYWHERE if same_everywhere else host
        expected = f"the trainer's {trainer}: they broadcast weights in one group"
        yield Finding(where, "engine's NCCL", str(engine), expected)
    for role in sorted({role for roles in evidence.values() for role in roles}):
        versions = {host: roles[role]["nccl"] for host, roles in evidence.items() if role in roles}
        yield from odd_ones(f"{role}'s NCCL", versions)
