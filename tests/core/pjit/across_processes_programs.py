"""One of the processes of a pod of eight devices: `python across_processes_programs.py FOLDER N`.

It runs every Nth of the programs that other tests compare with JAX, and writes the local shards of
their results; `tests.core.pjit.test_across_processes` assembles them.
"""

import pickle
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

jax.distributed.initialize()

import xlashard  # noqa: E402
from tests.core.pjit.libraries import ALL_OF_XLASHARD, optax_programs  # noqa: E402
from tests.core.pjit.named_programs import PROGRAMS, Library  # noqa: E402
from tests.core.pjit.random_programs.environment import numbers, xlashard_sharded  # noqa: E402
from tests.core.pjit.random_programs.generator import draw_program  # noqa: E402
from tests.core.pjit.random_programs.running import make_mesh, read_header, run, under  # noqa: E402
from tests.core.pjit.random_programs.text import program_text  # noqa: E402
from xlashard import AUTO, UNSPECIFIED, NamedSharding, P, device_put, pjit  # noqa: E402
from xlashard.auto import planner  # noqa: E402
from xlashard.hlo import read_collectives  # noqa: E402

OURS = Library(pjit, xlashard.with_sharding_constraint, NamedSharding)
MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
# Over all devices, called directly; JAX's transformations around them are out of scope.
RANDOM = 3


def pieces(tree: Any) -> list[Any]:
    """Return path, shape and dtype of each leaf, with this process's shards."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        x = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else leaf
        shards = [
            (
                [s.indices(n)[:2] for s, n in zip(shard.index, x.shape, strict=True)],
                np.asarray(shard.data),
            )
            for shard in x.addressable_shards
        ]
        found.append((jax.tree_util.keystr(path), x.shape, x.dtype.name, shards))
    return found


def named(name: str) -> tuple[Any, bool]:
    """Return the results of a program by its name, and whether it sums over devices."""
    program = PROGRAMS[name]

    def places(specs: Any) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(MESH, spec) if isinstance(spec, P) else spec,
            specs,
            is_leaf=lambda x: isinstance(x, P) or x is UNSPECIFIED,
        )

    f = pjit(
        program.make(OURS, MESH),
        in_shardings=places(program.in_specs),
        out_shardings=places(program.out_specs),
    )
    leaves, treedef = jax.tree.flatten(program.shapes)
    values = [numbers(s.shape, s.dtype.name, start) for start, s in enumerate(leaves)]
    values = [abs(v) if v.dtype == np.int32 else v for v in values]
    given = device_put(treedef.unflatten(values), places(program.in_specs))
    compiled = f.lower(*given).compile()
    reduces = any(c.kind in ("all-reduce", "reduce-scatter") for c in read_collectives(compiled))
    return compiled(*given), reduces


def drawn() -> Iterator[str]:
    """Yield the names of the first random programs over all devices that are called directly."""
    for seed in count():
        text = program_text(draw_program(seed))
        header = read_header(text)
        devices = int(np.prod(list(header.axes.values())))
        if devices == len(jax.devices()) and header.call in ("call", "lower"):
            yield text


def planned() -> Any:
    """Return the results of a program whose layout one process chooses for all."""
    mine: list[Any] = []
    solve = planner.solve

    def counted(program: Any, problem: Any, **limits: Any) -> Any:
        mine.append(program)
        return solve(program, problem, **limits)

    planner.solve = counted
    f = pjit(lambda s, x: (jnp.tanh(x @ s), x.sum()), in_shardings=AUTO, out_shardings=AUTO)
    values = numbers((64, 64), "float32", 1), numbers((64, 64), "float32", 2)
    with jax.set_mesh(MESH):
        state, _ = f(*values)
        results = f(device_put(state, NamedSharding(MESH, P("model", "data"))), values[1])
    planner.solve = solve
    assert len(mine) == (jax.process_index() == 0)
    return results


def write_all(folder: Path, step: int) -> None:
    out: dict[str, Any] = {}
    for name in list(PROGRAMS)[::step]:
        result, reduces = named(name)
        out[name] = pieces(result), reduces
    for number, text in islice(enumerate(drawn()), 0, RANDOM, step):
        header = read_header(text)
        mesh = make_mesh(header)
        with under(header.partitioner):
            ours = xlashard_sharded(mesh, header.manner == "named")
            out[f"random {number}"] = pieces(run(text, ours, mesh)), True
    if step == 1:  # Longer to compile than all the others together.
        trained = optax_programs.schedule_and_multi_steps(ALL_OF_XLASHARD, MESH)
        out["optax"] = pieces(trained.state), True
        out["auto"] = pieces(planned()), True
    place = folder / f"{jax.process_count()}-{jax.process_index()}.pickle"
    place.write_bytes(pickle.dumps(out))


write_all(Path(sys.argv[1]), int(sys.argv[2]))
