"""A server that only answers the health check. The engine's Python runs ``server.py -m MODULE --config OPTIONS``.

It watches its supervisor, and finds its place among several hosts, as the real server does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from megatron_dppo.engine.launch_server import host_flags, watch_supervisor


def main() -> None:
    """Answer the supervisor's health check at the address in the options."""
    sys.stdin.read()  # the keys
    watch_supervisor(lambda pid, include_parent: os._exit(1))
    flags = host_flags(os.environ)
    while flags and flags[1] != "0":  # the first host answers
        time.sleep(1)
    options = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    body = json.dumps({"model_path": options["model-path"]}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:  # the warm-up
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

    ThreadingHTTPServer((options["host"], options["port"]), Handler).serve_forever()


if __name__ == "__main__":
    main()
