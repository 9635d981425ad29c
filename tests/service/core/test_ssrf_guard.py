"""What users name is called only where it is public or allowed, and at the address that was checked."""

from __future__ import annotations

import asyncio
import http.server
import ipaddress
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.core import ssrf_guard
from service.core.settings import Settings
from service.core.ssrf_guard import TargetError, check_url, is_public, parse_networks, resolve

pytestmark = pytest.mark.anyio
LOOPBACK = parse_networks("127.0.0.0/8,::1")


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    """Answers with the Host it was asked for."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.headers["Host"].encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a00:1", "2002:7f00:1::", "2001:db8::1",
        "64:ff9b:1::7f00:1", "fec0::1", "::7f00:1", "4000::1", "192.0.0.192", "192.0.0.9", "192.88.99.1", "3fff::1",
        "3fff:fff::1", "2001::1", "2001:1::1", "2001:20::1", "2620:4f:8000::1", "::ffff:192.88.99.1",
        "2002:c058:6301::",
    ],
)  # fmt: skip
def test_addresses_within(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1", "93.184.216.34", "192.0.1.1", "192.88.98.1", "2606:4700::1111", "2001:4860::8888",
        "64:ff9b::101:101",
    ],
)  # fmt: skip
def test_addresses_of_the_internet(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://localhost:8080/", "http://2130706433/", "http://0x7f.1/", "http://0177.0.0.1/",
        "http://127.1/", "http://[::1]/", "http://[::ffff:7f00:1]/", "https://169.254.169.254/latest/meta-data",
        "http://0/",
    ],
)  # fmt: skip
async def test_what_leads_here_is_refused_however_it_is_written(url: str) -> None:
    with pytest.raises(TargetError, match="no public address"):
        await resolve(url)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "gopher://example.com/", "http://", "https://user:pw@example.com/", "http://a b/",
        "http://example.com:99999/", "http://example.com:0/", "http://example.com\\@127.0.0.1/", "//example.com",
        "http://example.com/\r\nX: y", "http://[::1/", "https://" + "a" * 3000,
    ],
)  # fmt: skip
async def test_what_is_no_target_is_refused(url: str) -> None:
    with pytest.raises(TargetError):
        await resolve(url)


async def test_a_name_with_one_address_within_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [[("93.184.216.34", 443), ("10.0.0.1", 443)]]

    def lookup(*_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", address) for address in answers.pop()]

    monkeypatch.setattr(ssrf_guard, "_look_up", lookup)
    with pytest.raises(TargetError, match=r"10\.0\.0\.1"):
        await resolve("https://both.example/")


async def test_a_name_server_that_does_not_answer_keeps_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def lookup(*_: Any, **__: Any) -> list[Any]:
        answered.wait(300)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(ssrf_guard, "RESOLVE_SECONDS", 600.0)
    waiting = [asyncio.create_task(resolve(f"https://slow{number}.example/")) for number in range(40)]
    try:
        await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.to_thread(lambda: None), 100)
        assert not any(task.done() for task in waiting)
    finally:
        answered.set()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_the_checked_address_is_the_one_that_is_called(
    server: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server.server_address[1]
    answers = [[("127.0.0.1", port)], [("127.0.0.2", port)]]

    def lookup(*_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", address) for address in answers.pop(0)]

    monkeypatch.setattr(ssrf_guard, "_look_up", lookup)
    target = await resolve(f"http://rebinds.example:{port}/hook?a=1", LOOPBACK)
    async with httpx.AsyncClient() as client:
        answer = await client.get(target.url, headers=target.headers, extensions=target.extensions)
    assert answer.text == f"rebinds.example:{port}"
    assert target.url == f"http://127.0.0.1:{port}/hook?a=1"
    assert target.extensions["sni_hostname"] == "rebinds.example"
    assert len(answers) == 1  # looked up once


async def test_an_international_name_is_called_in_ascii(
    server: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server.server_address[1]
    asked = []

    def lookup(host: str, port: int) -> list[Any]:
        asked.append(host)
        return [(0, 0, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(ssrf_guard, "_look_up", lookup)
    target = await resolve(f"http://BÜCHER.example:{port}/ü", LOOPBACK)
    async with httpx.AsyncClient() as client:
        answer = await client.get(target.url, headers=target.headers, extensions=target.extensions)
    assert answer.text == f"xn--bcher-kva.example:{port}"
    assert asked == [target.host] == [target.extensions["sni_hostname"]] == ["xn--bcher-kva.example"]


@pytest.mark.parametrize("host", ["faß.example", "ⓛocalhost", "ü" * 64 + ".example", "ü..example"])
def test_a_name_of_several_readings_is_refused(host: str) -> None:
    with pytest.raises(TargetError, match="has more than one ASCII form"):
        check_url(f"https://{host}/")


def test_networks_are_read_from_the_environment() -> None:
    found = Settings.from_environment({"EVENKEEL_TARGET_NETWORKS": "10.1.0.0/16, 127.0.0.1"}).target_networks
    assert [str(network) for network in found] == ["10.1.0.0/16", "127.0.0.1/32"]
    with pytest.raises(ValueError, match=r"10\.1\.0\.1/16"):
        Settings.from_environment({"EVENKEEL_TARGET_NETWORKS": "10.1.0.1/16"})
    assert check_url("https://example.com/a") == ("https", "example.com", 443)
    assert ssrf_guard.PORTS["http"] == 80
