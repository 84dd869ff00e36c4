"""Running coroutines to their end, also where a loop runs already, as in a notebook."""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run_coroutine[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, waited for by this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    # That loop stands still while this thread waits, so another one in another thread does it.
    with ThreadPoolExecutor(1, thread_name_prefix="serialization") as thread:
        return thread.submit(asyncio.run, coroutine).result()


async def gather_or_cancel[T](tasks: Iterable[Awaitable[T]]) -> list[T]:
    """What all of them give, in order; the first error ends the others before it is raised."""
    running = [asyncio.ensure_future(task) for task in tasks]
    try:
        return await asyncio.gather(*running)
    except BaseException:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
