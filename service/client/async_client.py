"""The client for programs with an event loop: the calls of :class:`service.client.Client`, awaited.

Each call is the client's own function. The function runs in a greenlet that hands requests, streams and pauses to the
event loop and waits for their results. So every call is written once, and no thread is needed.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx
from greenlet import getcurrent, greenlet

from .client import Client

_END = object()


class AsyncClient:
    """A session with one service for use in one event loop; close it, or use it as an asynchronous context manager.

    The class has the methods of :class:`service.client.Client`, under the same names, with the same arguments, results
    and errors: they are awaited, and methods that return an iterator (``items``, ``events``, ``read_logs``,
    ``follow_logs``) are iterated by ``async for``. Several calls may run at the same time. A cancelled call closes its
    connection. The arguments are those of :class:`service.client.Client`.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, timeout_seconds: float = 60.0):
        self._client = _Bridge(url, api_key, timeout_seconds=timeout_seconds)

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def is_local(self) -> bool:
        """True if the service's address is a loopback address, which is on this machine."""
        return self._client.is_local

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client._http.aclose()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


class _Bridge(Client):
    """A client that hands every wait to the event loop. Its calls run in greenlets of :func:`_awaited`."""

    _connection = httpx.AsyncClient

    def _send(self, request: httpx.Request, stream: bool) -> httpx.Response:
        answer: httpx.Response = _wait_for(self._http.send(request, stream=stream))
        return answer

    def _read(self, answer: httpx.Response) -> None:
        _wait_for(answer.aread())

    def _lines(self, answer: httpx.Response) -> Iterator[str]:
        return _iterated(answer.aiter_lines())

    def _bytes(self, answer: httpx.Response) -> Iterator[bytes]:
        return _iterated(answer.aiter_bytes())

    def _end(self, answer: httpx.Response) -> None:
        _wait_for(answer.aclose())

    def _pause(self, seconds: float) -> None:
        _wait_for(asyncio.sleep(seconds))


async def _awaited(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run the function in a greenlet and return its result; await each awaitable that :func:`_wait_for` hands over."""
    call = greenlet(function)
    waits = call.switch(*arguments, **options)
    while not call.dead:
        try:
            result = await waits
        except BaseException as error:  # including the cancellation of this task, so that the call can clean up
            waits = call.throw(error)
        else:
            waits = call.switch(result)
    return waits


def _wait_for(awaitable: Awaitable[Any]) -> Any:
    """Hand an awaitable to the event loop, from a greenlet of :func:`_awaited`, and return its result."""
    loop = getcurrent().parent
    assert loop is not None
    return loop.switch(awaitable)


def _iterated(parts: AsyncIterator[Any]) -> Iterator[Any]:
    while True:
        try:
            part = _wait_for(parts.__anext__())
        except StopAsyncIteration:
            return
        yield part


def _call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the asynchronous form of a method of the client."""
    if inspect.isgeneratorfunction(method):

        @functools.wraps(method)
        async def iterate(self: AsyncClient, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
            parts = method(self._client, *arguments, **options)
            try:
                while (part := await _awaited(next, parts, _END)) is not _END:
                    yield part
            finally:
                await _awaited(parts.close)

        return iterate

    @functools.wraps(method)
    async def call(self: AsyncClient, *arguments: Any, **options: Any) -> Any:
        return await _awaited(method, self._client, *arguments, **options)

    return call


for _name, _method in inspect.getmembers(Client, inspect.isfunction):
    if not _name.startswith("_") and _name not in vars(AsyncClient):
        setattr(AsyncClient, _name, _call(_method))
