"""The check that all nodes see the same files in the run directory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.cluster.preflight.evidence import (
    EVERYWHERE,
    Evidence,
    Finding,
    Needs,
    Site,
    culprits,
)

_CANARY, _REPLACED, _CONTEST = "canary", "replaced", "contest"
_POLL_S = 0.05


def collect_shared_folder(site: Site) -> dict[str, Any]:
    """Collect the nodes whose files this node saw, those whose replaced files it saw and when, and its exclusive
    creation.
    """
    meeting = site.meeting
    won = meeting.is_first(_CONTEST)
    meeting.say(_CANARY, _canary(meeting.host, "old"))
    # Read the file before it is replaced, so that this node may keep the old one in a cache.
    hosts = sorted(meeting.hear(_CANARY))
    meeting.say(_CANARY, _canary(meeting.host, "new"))
    meeting.say(_REPLACED, {})
    node_count = len(meeting.hear(_REPLACED))
    started = time.monotonic()
    while True:
        canaries = meeting.read(_CANARY)
        replaced = [host for host, canary in canaries.items() if canary == _canary(host, "new")]
        waited = time.monotonic() - started
        if len(replaced) >= node_count or waited > meeting.timeout_s:
            break
        time.sleep(_POLL_S)
    return {
        "seen": hosts,
        "replaced": replaced,
        "replaced_after_s": round(waited, 2),
        "won": won,
    }


def _canary(host: str, age: str) -> dict[str, str]:
    return {"host": host, "age": age}


def judge_shared_folder(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """Report nodes that missed another node's last file, or more than one winner of the exclusive creation.

    The fewest nodes that explain all missed files are named.
    """
    missed: set[frozenset[str]] = set()
    for host, entry in evidence.items():
        missed |= {
            frozenset((host, other)) for other in evidence.keys() - {host, *entry["replaced"]}
        }
    for host, count in culprits(missed):
        observation = f"unseen or old with {count} of {len(evidence) - 1} other nodes, either way"
        yield Finding(
            host, f"{needs.run_directory}: files of others", observation, "seen, and replaced"
        )
    winners = [host for host in sorted(evidence) if evidence[host]["won"]]
    if evidence and len(winners) != 1:
        names = ", ".join(winners) or "nobody"
        subject = f"{needs.run_directory}: winner of exclusive creation"
        yield Finding(EVERYWHERE, subject, names, "one node")
