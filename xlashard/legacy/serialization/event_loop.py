"""Running coroutines to completion, also inside a running event loop, as in a notebook."""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run_coroutine[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion and return its result, blocking this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    # This thread's loop is blocked, so run the coroutine in the loop of another thread.
    with ThreadPoolExecutor(1, thread_name_prefix="serialization") as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def gather_or_cancel[T](tasks: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of tasks in order; on an error, cancel the others and raise it."""
    running = [asyncio.ensure_future(task) for task in tasks]
    try:
        return await asyncio.gather(*running)
    except BaseException:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
