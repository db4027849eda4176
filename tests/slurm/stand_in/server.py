"""A server that is healthy and nothing else; run as the engine's Python: ``server.py -m MODULE --config OPTIONS``."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml


def main() -> None:
    """Serve the probe of the supervisor on the address that the options name."""
    sys.stdin.read()  # the keys
    options = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    body = json.dumps({"model_path": options["model-path"]}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    ThreadingHTTPServer((options["host"], options["port"]), Handler).serve_forever()


if __name__ == "__main__":
    main()
