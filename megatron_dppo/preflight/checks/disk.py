"""Free space where the run writes, and in the node's own folder for temporary files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.preflight.checks.base import Site
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import Finding, too_little
from megatron_dppo.preflight.needs import Needs


def collect(site: Site) -> dict[str, Any]:
    """Free bytes in the run directory and in the temporary folder, which is tried by a file."""
    with tempfile.TemporaryFile() as file:
        file.write(b"\0")
    folder = tempfile.gettempdir()
    return {
        "run_directory_free": shutil.disk_usage(site.needs.run_directory).free,
        "temporary": folder,
        "temporary_free": shutil.disk_usage(folder).free,
    }


def judge(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """At least what the run needs of both."""
    run = {host: told["run_directory_free"] for host, told in evidence.items()}
    yield from too_little(f"free space in {needs.run_directory}", run, needs.disk_bytes, "GiB")
    for host, told in evidence.items():
        free = {host: told["temporary_free"]}
        what = f"free space in {told['temporary']}"
        yield from too_little(what, free, needs.temporary_bytes, "GiB")
