"""Ports for servers that tests start: free, and not of those that the kernel hands out by itself.

One of the kernel's own (``bind`` to port 0) may go to anybody's connection before the server listens there, or while it
is killed and started again; and who connects to it too early may be connected to himself.
"""

from __future__ import annotations

import random
import socket

# Above the ports of Ray's workers, below Linux' ip_local_port_range.
LOWEST, HIGHEST = 20_000, 32_000
# Not the seed of anything that a test draws: two test processes are to try different ports.
_random = random.SystemRandom()


def free_ports(number: int) -> list[int]:
    """Different ones of 127.0.0.1."""
    found: set[int] = set()
    while len(found) < number:
        port = _random.randrange(LOWEST, HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.add(port)
    return list(found)


def free_port() -> int:
    (port,) = free_ports(1)
    return port
