"""Whether the nodes of an allocation can do a run's work, told by evidence that each collects.

One task a node writes a JSON file (``megatron-dppo preflight``); ``judge``, a pure function of
all files, names the nodes at fault and why. docs/preflight.md lists the checks.
"""

from megatron_dppo.preflight.evidence import read_evidence
from megatron_dppo.preflight.findings import EVERYWHERE, Finding
from megatron_dppo.preflight.needs import Needs, needs_of
from megatron_dppo.preflight.verdict import Verdict, judge

__all__ = ["EVERYWHERE", "Finding", "Needs", "Verdict", "judge", "needs_of", "read_evidence"]
