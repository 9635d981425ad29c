"""A small thread pool for reading whole datasets, separate from the threads that the runner and short requests use."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

NUM_THREADS = 2
_pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="long")
_brief_pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="brief")
_waiting_pool = ThreadPoolExecutor(4 * NUM_THREADS, thread_name_prefix="waiting")


async def in_thread(call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """Call like asyncio.to_thread, at most two calls at once; other calls wait without blocking anything else."""
    return await asyncio.get_running_loop().run_in_executor(_pool, functools.partial(call, *args, **kwargs))


async def in_brief_thread(
    call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call like :func:`in_thread`, for work of at most a second: it does not wait behind work that takes minutes."""
    return await asyncio.get_running_loop().run_in_executor(_brief_pool, functools.partial(call, *args, **kwargs))


async def in_waiting_thread(
    seconds: float, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call like :func:`in_thread`, for work that mostly waits for a server: it keeps no other work waiting.

    Raises:
        TimeoutError: There was no result within ``seconds``. A call that has begun goes on in its thread.
    """
    async with asyncio.timeout(seconds):
        return await asyncio.get_running_loop().run_in_executor(_waiting_pool, functools.partial(call, *args, **kwargs))
