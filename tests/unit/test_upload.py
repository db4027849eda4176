"""``convert upload``: the real huggingface_hub client against a local server with the hub's routes for small files.

huggingface.co itself is never asked, nor how it stores large files.
"""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_dppo.convert import main


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does where every file goes into the commit itself."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, body))
        if self.path.endswith("/create"):
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.answer({"url": f"{self.server.url}/{name}", "name": name, "id": name})
        elif "/preupload/" in self.path:
            plain = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": file["path"], **plain} for file in files]})
        else:
            self.answer({"commitUrl": f"{self.server.url}/me/sums/commit/abc", "commitOid": "abc"})

    def do_GET(self):
        self.send_error(404)

    def answer(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_): ...


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.url = [], f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def export(tmp_path):
    folder = tmp_path / "sums" / "hf"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder.parent / "metrics.jsonl").write_text("not of the export")
    return folder


def upload(folder, endpoint, *words):
    """In a child: the library reads its address while it is imported."""
    command = [sys.executable, "-m", "megatron_dppo", "convert", "upload", "--hf", str(folder)]
    variables = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [*command, *words], env={**os.environ, **variables}, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(("words", "visibility"), [((), "private"), (("--public",), "public")])
def test_an_export_is_one_commit_of_its_own_files(hub, export, words, visibility):
    done = upload(export, hub.url, "--repo", "me/sums", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{export}: {hub.url}/me/sums/commit/abc"
    (create,) = [json.loads(body) for path, body in hub.asked if path.endswith("/create")]
    assert (create["organization"], create["name"]) == ("me", "sums")
    assert create["visibility"] == visibility
    ((path, body),) = [(p, b) for p, b in hub.asked if "/commit/" in p]
    assert path == "/api/models/me/sums/commit/main"
    lines = [json.loads(line) for line in body.splitlines()]
    files = [line["value"] for line in lines if line["key"] == "file"]
    sent = {file["path"]: base64.b64decode(file["content"]) for file in files}
    assert sent == {"config.json": b"{}", "model.safetensors": b"weights"}
    assert lines[0]["value"]["summary"] == "Export of sums"


def test_nobody_who_answers_is_an_error_in_a_line(export):
    done = upload(export, "http://127.0.0.1:9", "--repo", "me/sums")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --repo me/sums: ")
    assert "Traceback" not in done.stderr


def test_a_package_that_is_not_there_is_a_line_that_says_how_to_get_it(export, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["upload", "--hf", str(export), "--repo", "me/sums"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("; an upload needs: pip install 'megatron-dppo[hub]'")


def test_a_folder_that_is_no_export_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["upload", "--hf", str(tmp_path), "--repo", "me/sums"]) == 2
    assert "expected an export: config.json and *.safetensors" in capsys.readouterr().err
