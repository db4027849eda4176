"""Base URLs of servers: which are accepted, and which are refused for which reason."""

import pytest

from megatron_dppo.system.network import url_fault, url_host


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.7:30000",
        "https://engine-3.cluster_a:1",
        "http://localhost",
        "http://[::1]:30000/fleet/a/",
        "http://host:65535",
    ],
)
def test_what_a_server_can_have_is_taken(url):
    assert url_fault(url) is None


@pytest.mark.parametrize(
    "url",
    [
        "localhost:3000",
        "ftp://host:1",
        "http://",
        "http://:1",
        "http://../../x:1",
        "http://a..b:1",
        "http://host:0",
        "http://host:1?x=1",
        "http://host:1#x",
        "http://ho st:1",
        "http://host:1\n",
    ],
)
def test_anything_else_is_refused(url):
    assert url_fault(url) == f"got {url!r}, expected http://host:port"


@pytest.mark.parametrize("url", ["http://host:65536", "http://host:x", "http://[::1:3"])
def test_what_urlsplit_says_is_told(url):
    problem = url_fault(url)
    assert problem is not None
    assert problem.startswith(f"got {url!r}, expected http://host:port: ")


@pytest.mark.parametrize(
    ("host", "written"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("engine-3", "engine-3"),
        ("::1", "[::1]"),
        ("fd00::7", "[fd00::7]"),
    ],
)
def test_an_ipv6_address_stands_in_brackets(host, written):
    assert url_host(host) == written
    assert url_fault(f"http://{written}:30000") is None
