"""Threads for what reads whole data sets: few, and apart from those that the runner and short requests need."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

NUM_THREADS = 2
_pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="heavy")
_brief_pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="brief")


async def in_thread(call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """Like asyncio.to_thread; a third caller waits for its turn, and keeps nobody else waiting."""
    return await asyncio.get_running_loop().run_in_executor(_pool, functools.partial(call, *args, **kwargs))


async def in_brief_thread(
    call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """The same for what takes a second at most: it does not wait for those that take minutes."""
    return await asyncio.get_running_loop().run_in_executor(_brief_pool, functools.partial(call, *args, **kwargs))
