"""JAX's distributed runtime: which process this is, and the key-value store that all share.

The store is a service of one process, the coordinator. A key's first writer has it, unless a writer
asks to overwrite; readers may wait for a key to come.
"""

from typing import Any

import jax
from jax._src import distributed


def client() -> Any:
    """The client of the coordination service; None in a program of one process."""
    return distributed.global_state.client


def process_index() -> int:
    """The number of this process. Unlike `jax.process_index()` it starts no backend."""
    return distributed.global_state.process_id


def process_count() -> int:
    """How many processes there are. Unlike `jax.process_count()` it starts no backend."""
    return distributed.global_state.num_processes


def write(key: str, value: bytes, *, overwrite: bool = False) -> bool:
    """Writes a value; False if there is one already, which then stays."""
    try:
        client().key_value_set_bytes(key, value, overwrite)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise
    return True


def read(key: str, seconds: float = 0) -> bytes | None:
    """The value of a key, waited for up to some seconds; None if there is none by then."""
    try:
        if seconds <= 0:
            return client().key_value_try_get_bytes(key)
        return client().blocking_key_value_get_bytes(key, int(seconds * 1000) + 1)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
            return None
        raise


def listed(folder: str) -> dict[str, bytes]:
    """The values of all keys below a folder, by the part of their names past it."""
    prefix = folder.rstrip("/") + "/"
    try:
        found = client().key_value_dir_get_bytes(prefix)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return {}
        raise
    return {key.removeprefix(prefix): value for key, value in found}


def drop(key: str) -> None:
    """Removes a key and all keys below it."""
    client().key_value_delete(key)
