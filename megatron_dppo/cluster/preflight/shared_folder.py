"""The check that all nodes see the same files in the run directory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.cluster.preflight.evidence import (
    EVERYWHERE,
    EvidenceByHost,
    Finding,
    Needs,
    Site,
    culprits,
)

# Names in the meeting. _CANARY: a file that each node writes and later replaces. _REPLACED: a node's announcement that
# its canary is replaced. _CONTEST: a file that only one node can create.
_CANARY, _REPLACED, _CONTEST = "canary", "replaced", "contest"


def collect_shared_folder(site: Site) -> dict[str, Any]:
    """Collect which files of other nodes this node sees.

    ``seen``: nodes whose file this node saw. ``replaced``: nodes whose new file this node saw. ``replaced_after_s``:
    seconds that this node waited for the new files. ``won``: whether this node won the exclusive creation of a file.
    """
    meeting = site.meeting
    has_won = meeting.is_first(_CONTEST)
    meeting.write(_CANARY, _canary(meeting.host, "old"))
    # Read the files before they are replaced: the check must find out whether this node's cache keeps the old contents.
    seen_hosts = sorted(meeting.wait_for_all(_CANARY))
    meeting.write(_CANARY, _canary(meeting.host, "new"))
    meeting.write(_REPLACED, {})
    node_count = len(meeting.wait_for_all(_REPLACED))
    started = time.monotonic()
    canaries = meeting.wait_until(_CANARY, lambda seen: len(_replaced(seen)) >= node_count)
    waited_s = time.monotonic() - started
    return {
        "seen": seen_hosts,
        "replaced": _replaced(canaries),
        "replaced_after_s": round(waited_s, 2),
        "won": has_won,
    }


def _replaced(canaries: Mapping[str, Any]) -> list[str]:
    """Return the hosts whose new file is seen."""
    return [host for host, canary in canaries.items() if canary == _canary(host, "new")]


def _canary(host: str, age: str) -> dict[str, str]:
    return {"host": host, "age": age}


def judge_shared_folder(evidence: EvidenceByHost, needs: Needs) -> Iterator[Finding]:
    """Report nodes that do not see each other's new files, and an exclusive creation without exactly one winner.

    In a faulty pair, one node did not see the other's new file. ``culprits`` selects the nodes to blame for the pairs.
    """
    missed_pairs: set[frozenset[str]] = set()
    for host, entry in evidence.items():
        for other_host in evidence.keys() - {host, *entry["replaced"]}:
            missed_pairs.add(frozenset((host, other_host)))
    subject = f"{needs.run_directory}: files of others"
    for host, count in culprits(missed_pairs):
        observation = f"unseen or old, in one direction or both, with {count} of {len(evidence) - 1} other nodes"
        yield Finding(host, subject, observation, "seen, and replaced")
    winners = [host for host in sorted(evidence) if evidence[host]["won"]]
    if evidence and len(winners) != 1:
        names = ", ".join(winners) or "nobody"
        subject = f"{needs.run_directory}: winner of exclusive creation"
        yield Finding(EVERYWHERE, subject, names, "one node")
