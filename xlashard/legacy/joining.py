"""Programs that never joined the others, in a pod.

On the TPU pods of 2022 the TPU runtime made the processes of a program one: nobody had to call
`jax.distributed.initialize()`, and programs did not. Emulated devices have no such runtime.
"""

import os
from typing import Any

import jax

from xlashard import multihost
from xlashard.config import read_flags


def join_pod() -> None:
    """Makes this process one of those of its emulated pod, if it is in one.

    A program that calls `jax.distributed.initialize()` afterwards is right as well: what it asks
    for is done.
    """
    if read_flags(os.environ).pod is None:
        return
    multihost.initialize()
    jax.distributed.initialize = _is_done


def _is_done(*args: Any, **kwargs: Any) -> None:
    """Stands for `jax.distributed.initialize`, whose work is done."""
