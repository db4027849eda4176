"""A real HTTPS server whose certificate the system does not trust, and clients that are given its issuer's file."""

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

from megatron_dppo.config.schema import EngineConfig
from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.errors import EngineLostError
from megatron_dppo.fleet import router_link
from megatron_dppo.fleet.http_router import HttpRouterProcess
from megatron_dppo.fleet.membership import MEMBERS, Member, client_of
from megatron_dppo.fleet.record import Keys, Server
from megatron_dppo.fleet.router_link import routed_servers, set_servers
from megatron_dppo.system.ports import free_port

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


def make_certificates(folder: Path, name: str) -> tuple[Path, Path, Path]:
    """Make an authority, and a certificate for ``ADDRESS`` that it signs.

    Returns the files of the authority, of the certificate, and of the certificate's key.
    """
    authority, authority_key = folder / f"{name}-ca.pem", folder / f"{name}-ca.key"
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    new_key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    openssl(f"req -x509 {new_key} -keyout {authority_key} -out {authority} -days 2 -subj /CN=ca")
    openssl(f"req {new_key} -keyout {key} -out {folder}/request -subj /CN={name}")
    extensions = folder / "extensions"
    extensions.write_text(f"subjectAltName=IP:{ADDRESS}\nbasicConstraints=CA:FALSE\n")
    openssl(
        f"x509 -req -in {folder}/request -CA {authority} -CAkey {authority_key} -CAcreateserial "
        f"-out {certificate} -days 2 -extfile {extensions}"
    )
    return authority, certificate, key


def openssl(words: str) -> None:
    program = shutil.which("openssl")
    assert program is not None, "install openssl"
    subprocess.run([program, *words.split()], check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[int, Path]]:
    """Start the HTTPS server; yield its port, and the file of the authority that signed its certificate."""
    authority, certificate, key = make_certificates(folder, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    serving = ThreadingHTTPServer((ADDRESS, 0), Handler)
    serving.socket = context.wrap_socket(serving.socket, server_side=True)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield serving.server_address[1], authority
    serving.shutdown()
    serving.server_close()


def get_model_info(member: Member) -> dict:
    async def get() -> dict:
        async with client_of(member) as client:
            return await client.get_json("/model_info")

    return asyncio.run(get())


def test_a_server_whose_issuer_is_named_is_talked_to(server: tuple[int, Path]) -> None:
    port, authority = server
    entry = Server("x", f"https://{ADDRESS}:{port}", origin="config")
    member = Member(entry, Keys("secret"), str(authority))
    (member,) = MEMBERS.validate_json(MEMBERS.dump_json([member]))
    assert get_model_info(member) == {"key": "Bearer secret"}


@pytest.mark.parametrize("trusted", ["the system's", "another's"])
def test_a_server_of_another_issuer_gets_no_key(
    server: tuple[int, Path], folder: Path, trusted: str
) -> None:
    port, _ = server
    ca_file = None if trusted == "the system's" else str(make_certificates(folder, "another")[0])
    member = Member(Server("x", f"https://{ADDRESS}:{port}"), Keys("secret"), ca_file)
    with pytest.raises(EngineLostError, match="CERTIFICATE_VERIFY_FAILED"):
        get_model_info(member)


def test_a_certificate_holds_for_its_address_alone(server: tuple[int, Path]) -> None:
    port, authority = server
    member = Member(Server("x", f"https://localhost:{port}"), Keys("secret"), str(authority))
    with pytest.raises(EngineLostError, match=r"[Hh]ostname mismatch"):
        get_model_info(member)


@pytest.mark.parametrize("trusted", [True, False])
def test_the_router_sends_to_it_too_where_it_is_told_of_the_authority(
    server: tuple[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    port, authority = server
    monkeypatch.setattr(router_link, "_REGISTRATION_SECONDS", 10.0 if trusted else 2.0)
    router = HttpRouterProcess(
        EngineConfig(ca_file=str(authority) if trusted else None),
        host=ADDRESS, port=free_port(ADDRESS), metrics_port=free_port(ADDRESS), log_path=tmp_path / "router.log",
        api_key="user", admin_api_key="admin",
    )  # fmt: skip
    url = f"https://{ADDRESS}:{port}"

    async def register() -> dict[str, str]:
        async with HttpClient(router.url, "user", "admin") as client:
            await set_servers(client, {url: "secret"})
            return await routed_servers(client)

    router.start()
    try:
        router.wait_healthy()
        if trusted:
            assert asyncio.run(register()).keys() == {url}
        else:
            with pytest.raises(EngineLostError, match=r"the router serves from \[\]"):
                asyncio.run(register())
    finally:
        router.kill()
