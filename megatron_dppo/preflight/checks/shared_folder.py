"""The run directory as all nodes see it: what one writes, the others read; a rename replaces it for all;
exclusive creation has one winner."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.preflight.checks.base import Site
from megatron_dppo.preflight.evidence import Evidence
from megatron_dppo.preflight.findings import EVERYWHERE, Finding, culprits
from megatron_dppo.preflight.needs import Needs

_TOPIC, _REPLACED, _CONTEST = "canary", "replaced", "contest"
_POLL_S = 0.05


def collect(site: Site) -> dict[str, Any]:
    """Whom this node saw, whose file it saw replaced and after how many seconds, whether it won."""
    meeting = site.meeting
    won = meeting.is_first(_CONTEST)
    meeting.say(_TOPIC, _content(meeting.host, "old"))
    seen = meeting.hear(_TOPIC)  # so that nodes may keep the old file in a cache
    meeting.say(_TOPIC, _content(meeting.host, "new"))
    meeting.say(_REPLACED, {})
    done = meeting.hear(_REPLACED)
    started = time.monotonic()
    while len(whole := _whole(meeting.read(_TOPIC))) < len(done):
        if time.monotonic() - started > meeting.timeout_s:
            break
        time.sleep(_POLL_S)
    waited = round(time.monotonic() - started, 2)
    return {"seen": sorted(seen), "replaced": whole, "replaced_after_s": waited, "won": won}


def _content(host: str, age: str) -> dict[str, str]:
    return {"host": host, "age": age}


def _whole(heard: Mapping[str, Any]) -> list[str]:
    return sorted(host for host, told in heard.items() if told == _content(host, "new"))


def judge(evidence: Mapping[str, Evidence], needs: Needs) -> Iterator[Finding]:
    """Every node saw every other's file, as it was written last, and one node won the contest.

    The fewest nodes that explain all unseen files are named.
    """
    hosts = sorted(evidence)
    missed = {
        frozenset((host, other))
        for host in hosts
        for other in hosts
        if host != other and other not in evidence[host]["replaced"]
    }
    for host, count in culprits(missed):
        got = f"unseen or old with {count} of {len(hosts) - 1} other nodes, either way"
        yield Finding(host, f"{needs.run_directory}: files of others", got, "seen, and replaced")
    winners = [host for host in hosts if evidence[host]["won"]]
    if evidence and len(winners) != 1:
        got = ", ".join(winners) or "nobody"
        what = f"{needs.run_directory}: winner of exclusive creation"
        yield Finding(EVERYWHERE, what, got, "one node")
