"""A local server with huggingface.co's routes for small files."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HubServer(ThreadingHTTPServer):
    """A server with the path and body of each request, its own address, and whether its repositories are public."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Hub)
        self.is_public = False
        self.asked: list[tuple[str, bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for files that are small enough to be part of the commit request."""

    server: HubServer

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, body))
        if self.path.endswith("/create"):
            repository = json.loads(body)
            name = f"{repository['organization']}/{repository['name']}"
            self.answer({"url": f"{self.server.url}/{name}", "name": name, "id": name})
        elif "/preupload/" in self.path:
            plain = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": file["path"], **plain} for file in files]})
        else:
            self.answer({"commitUrl": f"{self.server.url}/me/sums/commit/abc", "commitOid": "abc"})

    def do_GET(self):
        if self.path.startswith("/api/models/"):
            private = not self.server.is_public
            self.answer({"id": self.path.removeprefix("/api/models/"), "private": private})
        else:
            self.send_error(404)

    def answer(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_): ...


@contextmanager
def small_hub():
    server = HubServer()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
