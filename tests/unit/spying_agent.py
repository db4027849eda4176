"""A command of ``agent`` that looks around: ``python spying_agent.py FOLDER|- [PATH ...]``.

It asks the policy once, where it is given a policy, and reports its variables, what /proc shows it of processes, and
which of the paths it can read: as a file in FOLDER, or as its answer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any


def main() -> None:
    folder, *paths = sys.argv[1:]
    if os.environ.get("OPENAI_BASE_URL"):
        ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    found: dict[str, Any] = {
        "variables": dict(os.environ),
        "processes": processes(),
        "readable": [path for path in paths if is_readable(Path(path))],
    }
    if folder == "-":
        # An answer has 64 KiB at most.
        found["processes"] = sorted(found["processes"])
        print(json.dumps({"answer": json.dumps(found)}))
        return
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", delete=False) as file:
        json.dump(found, file)
    print(json.dumps({"reward": 1.0}))


def ask(url: str, key: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "3+5"}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).close()


def processes() -> dict[str, str]:
    """Of each process that can be read: its command line and its initial environment."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        shown = ""
        for name in ("cmdline", "environ"):
            try:
                shown += (process / name).read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
        found[process.name] = shown
    return found


def is_readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
