"""Memory that the ranks of one host share: exchanges between them without a network.

Even within a host gloo sends data through the loopback device: four copies, two of them in the kernel, and a thread
that polls. Here a rank copies the data for others into memory of its own that they have mapped. One small message tells
them its location, and they read it in place.

* The memory is anonymous (memfd_create) and handed over as a file descriptor: it has no name, and disappears when its
  ranks are killed.
* Messages go through Unix sockets (SOCK_SEQPACKET, one for each pair), so a rank that dies ends the waiting of all
  others at once, because they see that its socket is closed.
* Only ranks of the same user, kernel and network namespace connect. If any two cannot, all ranks use gloo instead
  (:mod:`embeddings.sharding.exchange.collectives`).
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import secrets
import socket
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

SWITCH = "EVENKEEL_HOST_MEMORY"
"""Environment variable; with the value ``0`` all exchanges use gloo."""

# Two slots, because a rank may write while others still read its previous data. When it reuses a slot, it has the
# others' messages of the exchange in between, which they send when they are done reading.
_NUM_SLOTS = 2
_ALIGNMENT = 64
_SMALLEST = 1 << 20
_MESSAGE_BYTES = 1 << 16
_CONNECT_SECONDS = 60.0
_DTYPES = {str(dtype): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip

Part = Tensor | Sequence[Tensor]
"""Data to send: a tensor, or several matrices, sent joined along columns."""

_of_group: WeakKeyDictionary[dist.ProcessGroup, HostMemory | None] = WeakKeyDictionary()


def host_memory(group: dist.ProcessGroup) -> HostMemory | None:
    """Return the memory that the ranks of ``group`` share; None for one rank, or ranks of several hosts.

    The first call for a group is collective.
    """
    if group not in _of_group:
        _of_group[group] = _connect(group) if dist.get_world_size(group) > 1 else None
    return _of_group[group]


class HostMemory:
    """Memory that ``len(peers)`` ranks share. ``peers[r]`` is the socket to rank r, None for this rank."""

    def __init__(self, rank: int, peers: Sequence[socket.socket | None], timeout_seconds: float) -> None:
        self._rank, self._peers = rank, list(peers)
        self._number = 0
        self._local: list[Tensor] = [torch.empty(0, dtype=torch.uint8) for _ in range(_NUM_SLOTS)]
        self._remote: list[list[Tensor]] = [list(self._local) for _ in peers]
        self._set_timeout(timeout_seconds)

    def exchange(self, what: str, *parts: Part) -> list[tuple[Tensor, ...]]:
        """Send ``parts`` to all ranks, and return the tensors of each rank, in rank order; a collective call.

        The tensors may differ between ranks in number, shape and dtype, and need not be contiguous. Do not write to the
        tensors of other ranks, which are valid until the next call: copy those to be kept.

        Args:
            what: the exchange's name, the same on every rank.
            parts: tensors, or sequences of matrices that are sent as one, joined along columns.

        Raises:
            ConnectionResetError: a rank is gone.
            TimeoutError: a rank does not come within the process group's timeout.
            RuntimeError: ranks are at different exchanges.
        """
        slot = self._number % _NUM_SLOTS
        locations, end = [], 0
        for part in parts:
            dtype, shape = _described(part)
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + math.prod(shape) * dtype.itemsize
            locations.append((str(dtype), shape, start))
        handed_over = self._grow(slot, end) if end > self._local[slot].numel() else None
        local = tuple(_view(self._local[slot], _DTYPES[name], shape, start) for name, shape, start in locations)
        for part, target in zip(parts, local, strict=True):
            if isinstance(part, Tensor):
                target.copy_(part)
            else:
                torch.cat(list(part), dim=1, out=target)
        self._tell(json.dumps((self._number, what, locations)).encode(), handed_over)
        received = [local if peer is None else self._read(rank, peer, what) for rank, peer in enumerate(self._peers)]
        self._number += 1
        return received

    def close(self) -> None:
        for peer in self._peers:
            if peer is not None:
                peer.close()

    __del__ = close

    def _set_timeout(self, seconds: float) -> None:
        self._timeout_seconds = seconds
        timeout = struct.pack("ll", int(seconds), 0)
        for peer in self._peers:
            if peer is not None:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def _grow(self, slot: int, num_bytes: int) -> int:
        """Allocate larger memory for ``slot``, and return the file descriptor that other ranks map it by."""
        size = -(-max(_SMALLEST, num_bytes + num_bytes // 4) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create("evenkeel", os.MFD_CLOEXEC)
        # Raises here if memory is short; a page that is missing later would be a SIGBUS.
        os.posix_fallocate(descriptor, 0, size)
        self._local[slot] = _map(descriptor, size)
        return descriptor

    def _tell(self, message: bytes, descriptor: int | None) -> None:
        assert len(message) <= _MESSAGE_BYTES, f"a message of {len(message)} bytes"
        try:
            for rank, peer in enumerate(self._peers):
                if peer is not None:
                    self._send(rank, peer, message, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _send(self, rank: int, peer: socket.socket, message: bytes, descriptor: int | None) -> None:
        try:
            if descriptor is None:
                peer.send(message)
            else:
                socket.send_fds(peer, [message], [descriptor])
        except BlockingIOError:
            raise self._too_late(rank) from None
        except (BrokenPipeError, ConnectionResetError):
            raise _gone(rank) from None

    def _read(self, rank: int, peer: socket.socket, what: str) -> tuple[Tensor, ...]:
        slot = self._number % _NUM_SLOTS
        try:
            message, descriptors, _, _ = socket.recv_fds(peer, _MESSAGE_BYTES, 1)
        except BlockingIOError:
            raise self._too_late(rank) from None
        except ConnectionResetError:
            raise _gone(rank) from None
        if not message:
            raise _gone(rank)
        for descriptor in descriptors:
            self._remote[rank][slot] = _map(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        number, name, locations = json.loads(message)
        if (number, name) != (self._number, what):
            raise RuntimeError(
                f"rank {rank} of the process group is at exchange {number} ({name}), this one at {self._number} "
                f"({what}): every rank must make the same collective calls in the same order"
            )
        memory = self._remote[rank][slot]
        return tuple(_view(memory, _DTYPES[dtype], shape, start) for dtype, shape, start in locations)

    def _too_late(self, rank: int) -> TimeoutError:
        return TimeoutError(
            f"rank {rank} of the process group did not come to exchange {self._number} within "
            f"{self._timeout_seconds:g} seconds: its own log says why"
        )


def _gone(rank: int) -> ConnectionResetError:
    return ConnectionResetError(f"connection closed by peer: rank {rank} of the process group has ended")


def joined(part: Part) -> Tensor:
    """Return ``part`` as one tensor: matrices are joined along columns."""
    if isinstance(part, Tensor):
        return part
    return part[0] if len(part) == 1 else torch.cat(list(part), dim=1)


def _described(part: Part) -> tuple[torch.dtype, tuple[int, ...]]:
    if isinstance(part, Tensor):
        return part.dtype, tuple(part.shape)
    return part[0].dtype, (len(part[0]), sum(block.shape[1] for block in part))


def _map(descriptor: int, size: int) -> Tensor:
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _view(memory: Tensor, dtype: torch.dtype, shape: Sequence[int], start: int) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    return memory[start : start + num_bytes].view(dtype).view(tuple(shape))


# --- from a process group to its memory ------------------------------------------------------------------------------


def _connect(group: dist.ProcessGroup) -> HostMemory | None:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # An abstract name, which disappears with the socket. The user who connects is checked.
        address = b"\0evenkeel-" + secrets.token_hex(16).encode()
        listener.bind(address)
        listener.listen(world_size)
        listener.settimeout(_CONNECT_SECONDS)
        hosts: list[Any] = [None] * world_size
        dist.all_gather_object(hosts, (_host(), address), group=group)
        if hosts[0][0] is None or any(host != hosts[0][0] for host, _ in hosts):
            return None
        peers, problem = _peers(rank, listener, [address for _, address in hosts])
    problems: list[Any] = [None] * world_size
    dist.all_gather_object(problems, problem, group=group)
    failures = [f"rank {number}: {text}" for number, text in enumerate(problems) if text is not None]
    if not failures:
        return HostMemory(rank, peers, _timeout_seconds(group))
    for peer in peers:
        if peer is not None:
            peer.close()
    if rank == 0:
        warnings.warn(
            f"ranks of this host cannot share memory ({'; '.join(failures)}), so they exchange through gloo, which is "
            f"slower ({SWITCH}=0 if that is meant)",
            stacklevel=2,
        )
    return None


def _host() -> list[Any] | None:
    """Return the identity that ranks must share to connect; None if shared memory is switched off."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return [kernel, os.stat("/proc/self/ns/net").st_ino, os.getuid()]
    except OSError:
        return None


def _peers(
    rank: int, listener: socket.socket, addresses: Sequence[bytes]
) -> tuple[list[socket.socket | None], str | None]:
    """Return a socket to every other rank, and a description of any problem; higher ranks connect to lower ranks."""
    peers: list[socket.socket | None] = [None] * len(addresses)
    problem = None
    for number in range(len(addresses)):
        # Go on after a problem, so that ranks that wait for this one learn of it at once.
        try:
            if number < rank:
                peers[number] = peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                peer.connect(addresses[number])
                _check_user(peer)
                peer.send(struct.pack("l", rank))
            elif number > rank:
                peer = listener.accept()[0]
                with contextlib.ExitStack() as on_failure:
                    on_failure.callback(peer.close)
                    peer.settimeout(_CONNECT_SECONDS)
                    _check_user(peer)
                    (who,) = struct.unpack("l", peer.recv(64))
                    on_failure.pop_all()
                peer.settimeout(None)
                peers[who] = peer
        except (OSError, struct.error) as error:
            if number < rank and (failed := peers[number]) is not None:
                failed.close()
            problem = problem or str(error) or type(error).__name__
    return peers, problem


def _check_user(peer: socket.socket) -> None:
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise PermissionError(f"user {user} wanted to be a rank of a run of user {os.getuid()}")


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return float(max(1.0, timeout.total_seconds()))
