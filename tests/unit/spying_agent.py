"""A command for the environment ``agent`` that reports what it can see: ``python spying_agent.py FOLDER|- [PATH ...]``.

It calls the policy once, if there is one. It reports its environment variables, what /proc shows of processes, and
which of the paths it can read. The report is a file in FOLDER, or for ``-`` the command's answer.
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
    report: dict[str, Any] = {
        "variables": dict(os.environ),
        "processes": visible_processes(),
        "readable": [path for path in paths if is_readable(Path(path))],
    }
    if folder == "-":
        # An answer may have 64 KiB, so the report keeps only the ids of processes.
        report["processes"] = sorted(report["processes"])
        print(json.dumps({"answer": json.dumps(report)}))
        return
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", delete=False) as file:
        json.dump(report, file)
    print(json.dumps({"reward": 1.0}))


def ask(url: str, key: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "3+5"}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).close()


def visible_processes() -> dict[str, str]:
    """Return command line and initial environment, in one text, of each process by its id."""
    texts = {}
    for process in Path("/proc").glob("[0-9]*"):
        text = ""
        for name in ("cmdline", "environ"):
            try:
                text += (process / name).read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
        texts[process.name] = text
    return texts


def is_readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
