"""A real HTTPS server with a certificate that the system does not trust, and clients that name its issuer."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_dppo.engine.errors import EngineLostError
from megatron_dppo.fleet.folder import Keys, Server
from megatron_dppo.fleet.members import Member, client_of
from megatron_dppo.fleet.membership import member_from_json, member_to_json

ADDRESS = "127.0.0.1"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"key": self.headers["Authorization"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def self_signed(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate of ``ADDRESS`` that signs itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    openssl = shutil.which("openssl")
    assert openssl is not None, "install openssl"
    command = [
        openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2",
        "-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{ADDRESS}",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[int, Path]]:
    """Its port, and the file of its certificate."""
    certificate, key = self_signed(folder, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    serving = ThreadingHTTPServer((ADDRESS, 0), Handler)
    serving.socket = context.wrap_socket(serving.socket, server_side=True)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield serving.server_address[1], certificate
    serving.shutdown()
    serving.server_close()


def ask(member: Member) -> dict:
    async def get() -> dict:
        async with client_of(member) as client:
            return await client.get_json("/model_info")

    return asyncio.run(get())


def test_a_server_whose_issuer_is_named_is_talked_to(server: tuple[int, Path]) -> None:
    port, certificate = server
    place = Server("x", f"https://{ADDRESS}:{port}", origin="config")
    member = Member(place, Keys("secret"), str(certificate))
    assert ask(member_from_json(json.loads(json.dumps(member_to_json(member))))) == {
        "key": "Bearer secret"
    }


@pytest.mark.parametrize("trusted", ["the system's", "another's"])
def test_a_server_of_another_issuer_gets_no_key(
    server: tuple[int, Path], folder: Path, trusted: str
) -> None:
    port, _ = server
    ca_file = None if trusted == "the system's" else str(self_signed(folder, "another")[0])
    member = Member(Server("x", f"https://{ADDRESS}:{port}"), Keys("secret"), ca_file)
    with pytest.raises(EngineLostError, match="CERTIFICATE_VERIFY_FAILED"):
        ask(member)


def test_a_certificate_holds_for_its_address_alone(server: tuple[int, Path]) -> None:
    port, certificate = server
    member = Member(Server("x", f"https://localhost:{port}"), Keys("secret"), str(certificate))
    with pytest.raises(EngineLostError, match=r"[Hh]ostname mismatch"):
        ask(member)
