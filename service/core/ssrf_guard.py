"""Checks of URLs that users choose and this service calls (webhooks): resolved once, checked, pinned to the address.

The name is resolved here and the connection goes to the address that was checked. So a DNS answer that changes in
between (DNS rebinding) has no effect. Callers must not follow redirects, whose targets are unchecked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PORTS = {"https": 443, "http": 80}
RESOLVE_SECONDS = 5.0
MAX_LENGTH = 2048
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL = ipaddress.ip_network("2000::/3")
"""Network of public IPv6 addresses; addresses outside are site-local, or of a site's own gateways (RFC 8215)."""
_SPECIAL = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2620:4f:8000::/48", "3fff::/20"))
)
"""Special-purpose networks (IANA) that ``ipaddress`` takes for global, in whole or in part."""
# A name server that does not answer blocks a thread for long, so these threads are not those of the runner and
# requests.
_threads = ThreadPoolExecutor(8, thread_name_prefix="resolve")


class TargetError(ValueError):
    """Error for a URL that this service refuses to call, with the cause and the remedy."""


class Target(NamedTuple):
    """A URL pinned to the address that was checked.

    ``client.post(target.url, headers=target.headers, extensions=target.extensions, follow_redirects=False)`` (httpx)
    calls that address, under the name that the user gave: Host header, TLS server name, certificate.
    """

    url: str
    host: str
    address: Address
    headers: dict[str, str]
    extensions: dict[str, Any]


def parse_networks(text: str) -> tuple[Network, ...]:
    """Parse networks separated by commas, such as ``10.1.0.0/16,127.0.0.1``.

    Raises:
        ValueError: One of them is invalid; the message names it.
    """
    networks = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            networks.append(ipaddress.ip_network(part))
        except ValueError as error:
            raise ValueError(f"EVENKEEL_TARGET_NETWORKS: '{part}' is no network such as 10.1.0.0/16: {error}") from None
    return tuple(networks)


def check_url(url: str) -> tuple[str, str, int]:
    """Return (scheme, host, port) of a URL, checked as far as possible without resolving its name.

    The host is returned in ASCII, the form used for DNS, headers and certificates.

    Raises:
        TargetError: The URL is invalid.
    """
    if len(url) > MAX_LENGTH or not url.isprintable() or " " in url or "\\" in url:
        raise TargetError(f"the URL has blanks, backslashes or more than {MAX_LENGTH} characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TargetError(f"'{url}' is no URL: {error}") from None
    if parts.scheme not in PORTS:
        raise TargetError(f"'{url}': the scheme must be https or http")
    if "@" in parts.netloc:
        raise TargetError("the URL carries a user name or password: leave it out")
    if not host or port == 0:
        raise TargetError(f"'{url}' names no host and port that can be called")
    return parts.scheme, _in_ascii(host), port or PORTS[parts.scheme]


def _in_ascii(host: str) -> str:
    if host.isascii():
        return host
    try:
        ascii_host = host.encode("idna")
        same = ascii_host.decode("idna") == host
    except UnicodeError:
        same = False
    # older and newer IDNA rules encode "ß", for example, differently: one form may be somebody else's name
    if not same:
        raise TargetError(f"'{host}' has more than one ASCII form: give the one you mean, xn--...")
    return ascii_host.decode()


async def resolve(url: str, allowed: Sequence[Network] = ()) -> Target:
    """Resolve the name in a URL and return the target to call.

    ``allowed``: networks that may be called although they are not public.

    Raises:
        TargetError: The URL is invalid, the name has no address, or one of its addresses is neither public nor allowed.
    """
    scheme, host, port = check_url(url)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            entries = await loop.run_in_executor(_threads, _look_up, host, port)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise TargetError(f"the name '{host}' cannot be resolved: {error or 'no answer'}") from None
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in entries]
    for address in addresses:
        if not (is_public(address) or any(address in network for network in allowed)):
            raise TargetError(
                f"'{host}' is {address}, which is no public address: call another, or have the operator add its "
                "network to EVENKEEL_TARGET_NETWORKS where the service runs"
            )
    address = addresses[0]
    literal = f"[{address}]" if address.version == 6 else str(address)
    name = f"[{host}]" if ":" in host else host
    shown = name if port == PORTS[scheme] else f"{name}:{port}"
    pinned = urlunsplit(urlsplit(url)._replace(netloc=f"{literal}:{port}", fragment=""))
    return Target(pinned, host, address, {"Host": shown}, {"sni_hostname": host})


def _look_up(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def is_public(address: Address) -> bool:
    """Return True if an address belongs to the public internet.

    Private, loopback, link-local, shared, reserved and multicast addresses are not public, and neither are IPv6
    addresses that embed such an IPv4 address.
    """
    if any(address in network for network in _SPECIAL):
        return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address not in _GLOBAL:
            return False
    return address.is_global and not address.is_multicast
