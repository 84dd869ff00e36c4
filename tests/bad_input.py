"""Calls of the public functions with one or two arguments replaced by random wrong ones.

`python -m tests.bad_input --count 20000 --start 0` makes as many and prints those that end in an
error that no user can read: not of `xlashard.errors`, and not raised on purpose.
"""

import argparse
import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout

import xlashard
from xlashard import Array, Mesh, NamedSharding, P, multihost
from xlashard.core.sharding import AbstractMesh, GSPMDSharding, SingleDeviceSharding
from xlashard.errors import XlashardError
from xlashard.legacy.shardings.pmap import PmapSharding
from xlashard.legacy.shardings.sharding_spec import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
)

PACKAGE = Path(xlashard.__file__).parent
DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES[:8]).reshape(4, 2), ("x", "y"))
ROWS = NamedSharding(MESH, P("x"))
TILES = GSPMDSharding(DEVICES[:8], "{devices=[4,2]<=[8]}")
ONE = SingleDeviceSharding(DEVICES[0])
STACKED = PmapSharding(DEVICES[:8], ShardingSpec((Chunked((8,)), NoSharding()), (ShardedAxis(0),)))


# Source of NumPy's error texts for its own protocols.
NUMPYS = ("core/array/array_class/protocols.py",)


class Hostile:
    """Object whose protocols return values of wrong types or raise errors."""

    def __index__(self) -> Any:
        return "8"

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("not iterable after all")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return [1, 2]


def values() -> dict[str, Any]:
    """Return wrong or unusual values by the names of a report; made anew for each call."""
    array = xlashard.device_put(np.arange(8.0, dtype=np.float32), ROWS)
    deleted = xlashard.device_put(np.ones(8, np.float32))
    deleted.delete()
    return {
        "None": None,
        "True": True,
        "-1": -1,
        "2**31": 2**31,
        "10**30": 10**30,
        "1.5": 1.5,
        "nan": float("nan"),
        "1+2j": 1 + 2j,
        "''": "",
        "'é'": "é",
        "'x'": "x",
        "NUL": "a\0b",
        "surrogate": "\ud800",
        "b'ab'": b"ab",
        "()": (),
        "(8,)": (8,),
        "(8, 8)": (8, 8),
        "(-1,)": (-1,),
        "(4.0,)": (4.0,),
        "('a',)": ("a",),
        "[]": [],
        "[[8]]": [[8]],
        "{}": {},
        "{'a': 1}": {"a": 1},
        "{1, 'a'}": {1, "a"},
        "object()": object(),
        "Hostile()": Hostile(),
        "Hostile": Hostile,
        "int": int,
        "len": len,
        "lambda": lambda *_: None,
        "Ellipsis": ...,
        "NotImplemented": NotImplemented,
        "slice": slice(None),
        "range": range(3),
        "np.float32": np.float32,
        "np.ones(3)": np.ones(3),
        "np objects": np.array([object()], dtype=object),
        "np str": np.array(["a"]),
        "np.int64(8)": np.int64(8),
        "jnp.ones(8)": jnp.ones(8),
        "Array": array,
        "deleted": deleted,
        "key": jax.random.key(0),
        "ShapeDtypeStruct": jax.ShapeDtypeStruct((8,), np.float32),
        "device": DEVICES[1],
        "devices": DEVICES[:8],
        "mesh": MESH,
        "empty mesh": Mesh(np.empty((), dtype=object), ()),
        "AbstractMesh": AbstractMesh((4, 2), ("x", "y")),
        "P('x')": P("x"),
        "P('z')": P("z"),
        "P(unreduced)": P(unreduced=frozenset({"x"})),
        "ROWS": ROWS,
        "TILES": TILES,
        "ONE": ONE,
        "STACKED": STACKED,
        "jax sharding": jax.sharding.NamedSharding(MESH, P("y")),
        "Layout": Layout((0,)),
        "generator": (n for n in (8, 8)),
        "exception": ValueError("a"),
        "module": os,
    }


def twice(x: Any) -> Any:
    return x * 2


@dataclass(frozen=True)
class Good:
    """Valid call, whose arguments are replaced one by one.

    Attributes:
        function: The function.
        args: Its arguments; a function without parameters makes each anew.
        keywords: Its keyword arguments, in the same form.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()


def good(function: Callable[..., Any], *args: Any, **keywords: Any) -> Good:
    return Good(function, args, tuple(keywords.items()))


VALUES = np.arange(64.0, dtype=np.float32).reshape(8, 8)


def calls(array: Array) -> dict[str, Good]:
    """Return valid calls of the public functions with an array, by name."""
    made = xlashard.pjit(twice, in_shardings=ROWS, out_shardings=ROWS)
    lowered = made.lower(array)
    compiled = lowered.compile()
    text = lowered.as_text()

    def call_pjit(*args: Any, **keywords: Any) -> Any:
        make: Any = xlashard.pjit
        return make(*args, **keywords)(array)

    def call_jit(*args: Any, **keywords: Any) -> Any:
        make: Any = xlashard.jit
        return make(*args, **keywords)(array)

    found = {
        "device_put": good(xlashard.device_put, array, ROWS, donate=False, may_alias=None),
        "device_get": good(xlashard.device_get, array),
        "device_put_replicated": good(xlashard.device_put_replicated, array, DEVICES[:2]),
        "device_put_sharded": good(xlashard.device_put_sharded, [1.0, 2.0], DEVICES[:2]),
        "from_dlpack": good(xlashard.from_dlpack, np.ones(3)),
        "key_shards": good(xlashard.key_shards, jax.random.key(0)),
        "live_arrays": good(xlashard.live_arrays, "cpu"),
        "unstacked_shards": good(xlashard.unstacked_shards, array),
        "make_array_from_callback": good(
            xlashard.make_array_from_callback, (8,), ROWS, lambda index: np.ones(8)[index]
        ),
        "make_array_from_process_local_data": good(
            xlashard.make_array_from_process_local_data, ROWS, np.ones((8, 8)), (8, 8)
        ),
        "make_array_from_single_device_arrays": good(
            xlashard.make_array_from_single_device_arrays, (8,), ONE, [jnp.ones(8)]
        ),
        "make_device_array": good(
            xlashard.make_device_array, jax.ShapeDtypeStruct((8,), np.float32), None, jnp.ones(8)
        ),
        "visualize": good(xlashard.visualize, array),
        "reshard_plan": good(xlashard.reshard_plan, array, ROWS),
        "pjit": good(
            call_pjit,
            twice,
            in_shardings=ROWS,
            out_shardings=ROWS,
            static_argnums=(),
            donate_argnums=(),
            keep_unused=False,
            device=None,
            inline=False,
        ),
        "jit": good(
            call_jit,
            twice,
            in_shardings=ROWS,
            out_shardings=ROWS,
            static_argnames=(),
            donate_argnames=(),
        ),
        "a call": good(made, array),
        "lower": good(made.lower, array),
        "compile": good(lowered.compile, {}),
        "a compiled call": good(compiled, array),
        "as_text": good(lowered.as_text, dialect="stablehlo", debug_info=False),
        "explain": good(xlashard.explain, made, array),
        "explain_recompile": good(xlashard.explain_recompile, made),
        "compile_stablehlo": good(xlashard.compile_stablehlo, text, DEVICES[:8]),
        "deserialize": good(xlashard.Compiled.deserialize, b"", DEVICES[:8]),
        "with_sharding_constraint": good(xlashard.with_sharding_constraint, array, ROWS),
        "NamedSharding": good(NamedSharding, MESH, P("x"), memory_kind="device"),
        "GSPMDSharding": good(GSPMDSharding, DEVICES[:8], "{replicated}", memory_kind="device"),
        "SingleDeviceSharding": good(SingleDeviceSharding, DEVICES[0], memory_kind="device"),
        "PmapSharding": good(PmapSharding, DEVICES[:8], STACKED.sharding_spec),
        "PmapSharding.default": good(PmapSharding.default, (8, 4), 0, devices=DEVICES[:8]),
        "ShardingSpec": good(ShardingSpec, (Chunked((8,)),), (ShardedAxis(0),)),
        "Chunked": good(Chunked, (8,)),
        "Unstacked": good(Unstacked, 8),
        "Replicated": good(Replicated, 8),
        "ShardedAxis": good(ShardedAxis, 0),
        "broadcast_one_to_all": good(multihost.broadcast_one_to_all, np.ones(3)),
        "process_allgather": good(multihost.process_allgather, np.ones(3)),
        "assert_equal": good(multihost.assert_equal, np.ones(3), "text"),
        "host_local_array_to_global_array": good(
            multihost.host_local_array_to_global_array, np.ones((8, 8)), MESH, P("x")
        ),
        "global_array_to_host_local_array": good(
            multihost.global_array_to_host_local_array, array, MESH, P("x")
        ),
        "sync_global_devices": good(multihost.sync_global_devices, "name"),
        "initialize": good(
            multihost.initialize, None, 1, None, timeout=1.0, heartbeat=1.0, bind=None, tls=None
        ),
        "Watchdog": good(multihost.Watchdog, 100.0, folder=None, report_signal=None),
    }
    for name, sharding in (("ROWS", ROWS), ("TILES", TILES), ("ONE", ONE), ("STACKED", STACKED)):
        shape = (8, 4)
        for method in ("shard_shape", "devices_indices_map", "addressable_devices_indices_map"):
            found[f"{name}.{method}"] = good(getattr(sharding, method), shape)
        for method in ("is_compatible_aval", "check_compatible_aval", "tiling", "jax_sharding"):
            found[f"{name}.{method}"] = good(getattr(sharding, method), shape)
        found[f"{name}.rank_tiling"] = good(sharding.rank_tiling, 2)
        found[f"{name}.is_equivalent_to"] = good(sharding.is_equivalent_to, sharding, 2)
        found[f"{name}.with_memory_kind"] = good(sharding.with_memory_kind, "device")
    for name in ("addressable_data", "reshape", "astype", "sum", "__getitem__", "at", "item"):
        member = getattr(array, name)
        found[f"Array.{name}"] = good(member if callable(member) else member.__getitem__, 0)
    found |= {
        "Array.__eq__": good(array.__eq__, array),
        "Array.__matmul__": good(array.__matmul__, array),
        "Array.__array__": good(array.__array__, np.float32),
        "Array.__dlpack__": good(array.__dlpack__, stream=None, max_version=(1, 0)),
        "Array.copy_to_host_async": good(array.copy_to_host_async),
        "Array.to_device": good(array.to_device, DEVICES[0], stream=None),
        "Array.view": good(array.view, np.int32),
    }
    return found


def trouble_of(error: BaseException) -> str:
    """Return the line of the package that raised an internal error; empty for errors for users."""
    if isinstance(error, XlashardError | NotImplementedError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not Path(frames[-1].filename).is_relative_to(PACKAGE):
        return ""
    last = frames[-1]
    if any(last.filename.endswith(name) for name in NUMPYS) and last.name != "__bool__":
        return ""
    on_purpose = (last.line or "").startswith("raise ") and last.name != "__bool__"
    if on_purpose or getattr(error, "__notes__", ()):
        return ""
    return f"{Path(last.filename).relative_to(PACKAGE)}:{last.lineno} {type(error).__name__}"


def outcome(call: Good, wrong: dict[int | str, Any]) -> tuple[str, str]:
    """Return the line and the text of an internal error of a call; empty without one."""
    args = [wrong.get(number, arg) for number, arg in enumerate(call.args)]
    keywords = {name: wrong.get(name, value) for name, value in call.keywords}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call.function(*args, **keywords)
            repr(result)
            jax.block_until_ready(result)
    except Exception as error:
        return trouble_of(error), f"{type(error).__name__}: {error}"
    return "", ""


def run(start: int, count: int, before_each: Callable[[str], object]) -> dict[str, str]:
    """Make random wrong calls.

    Args:
        start: The first seed.
        count: Number of calls.
        before_each: Called with the title of each call before the call.

    Returns:
        By the line of the package where an error was raised: the first call, and the error's text.
    """
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    found: dict[str, str] = {}
    try:
        array = xlashard.device_put(VALUES, ROWS)
        known = calls(array)
        for seed in range(start, start + count):
            rng = random.Random(seed)
            name = rng.choice(list(known))
            call = known[name]
            places = [*range(len(call.args)), *(key for key, _ in call.keywords)]
            pool = values()
            wrong = {
                place: rng.choice(list(pool))
                for place in rng.sample(places, min(len(places), rng.choice((1, 1, 1, 2))))
            }
            title = f"{seed}: {name} {wrong}"
            before_each(title)
            trouble, text = outcome(call, {place: pool[key] for place, key in wrong.items()})
            if array.is_deleted() and not text:  # It was donated.
                array = xlashard.device_put(VALUES, ROWS)
                known = calls(array)
            if array.is_deleted() or not np.array_equal(array, VALUES):
                found.setdefault(f"an array was damaged by {name}", f"{title}: {text}")
                array = xlashard.device_put(VALUES, ROWS)
                known = calls(array)
            if trouble:
                found.setdefault(trouble, f"{title}: {text}")
    finally:
        jax.config.update("jax_traceback_filtering", before)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--loud", action="store_true", help="print each call before it is made")
    words = parser.parse_args()
    found = run(words.start, words.count, print if words.loud else lambda title: None)
    for trouble, text in sorted(found.items()):
        print(f"{trouble}\n    {text[:300]}")
    print(f"{len(found)} lines of the package raised errors that are no answers")


if __name__ == "__main__":
    main()
