"""Both readers return the same module: proto and text of ten programs on CPU, two on TPU."""

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.grouped_cases import sweep
from tests.hlo import encode
from xlashard import Mesh, P, hlo, pjit
from xlashard.errors import ArgumentError
from xlashard.hlo import Attributes, HloProgram, Instruction
from xlashard.support.wire import SerializedFields, message_type
from xlashard.tpu import topology

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def scan(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=5)


def backward(x: Any, w: Any) -> Any:
    return jax.grad(lambda w: jax.lax.scan(jax.checkpoint(scan), x, w)[0].sum(), allow_int=True)(w)


def branches(x: Any, w: Any) -> Any:
    return jax.lax.switch(jnp.int32(x[0, 0]), [jnp.sin, jnp.cos, lambda x: x @ w], x)


def until(x: Any, w: Any) -> Any:
    return jax.lax.while_loop(lambda x: x.sum() < 1e3, lambda x: x @ w + 1, x)


def convolution(x: Any, w: Any) -> Any:
    image, kernel = x.reshape(1, 4, 4, 8), w[:8].reshape(4, 2, 8, 2)
    return jax.lax.conv_general_dilated(
        image, kernel, (1, 2), [(1, 0), (0, 2)], (2, 1), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def windows(x: Any, w: Any) -> Any:
    pooled = jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 3), (1, 2), [(1, 0), (0, 2)])
    return jnp.fft.rfft(pooled).real, jnp.sort(w)[:, ::-1], w.at[jnp.arange(4) * 3].add(1.0)


def ring(x: Any, w: Any) -> Any:
    def one(x: Any) -> Any:
        moved = jax.lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)])
        groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
        return jax.lax.psum(moved, "x") + jax.lax.psum(x, "x", axis_index_groups=groups)

    return jax.shard_map(one, mesh=mesh(), in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)


def exchange(x: Any, w: Any) -> Any:
    def one(x: Any) -> Any:
        return jax.lax.all_to_all(x, "x", 1, 0, tiled=True)

    return jax.shard_map(one, mesh=mesh(), in_specs=P("x"), out_specs=P("x"))(x)


def precise(x: Any, w: Any) -> Any:
    return jax.lax.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), precision="highest")


def linear_algebra(x: Any, w: Any) -> Any:
    return jnp.linalg.cholesky(w @ w.T + jnp.eye(16)), jax.random.normal(jax.random.key(0), (4,))


PROGRAMS = (
    *(scan, branches, until, convolution, windows, ring, exchange, precise, linear_algebra),
    lambda x, w: jax.grad(lambda w: scan(x, w)[0].sum())(w),
)


def mesh() -> Any:
    return Mesh(np.array(jax.devices()), ("x",))


def compiled(fun: Any, on: Any) -> Any:
    sharded = jax.sharding.NamedSharding(on, P(on.axis_names[0]))
    return jax.jit(fun, in_shardings=(sharded, sharded)).lower(X, W).compile()


def of_text(program: Any) -> HloProgram:
    return hlo.read(program.as_text())


def facts(instruction: Instruction) -> dict[str, Any]:
    attributes = {f.name: getattr(instruction.attributes, f.name) for f in fields(Attributes)}
    # The text may have the fields of an object in another order.
    with suppress(ValueError):
        attributes["backend_config"] = json.loads(attributes["backend_config"])
    names = ("name", "opcode", "shape", "operands", "calls", "is_root")
    return attributes | {name: getattr(instruction, name) for name in names}


def check_alike(proto: HloProgram, text: HloProgram) -> None:
    """Assert that two readings of a module are equal, instruction by instruction."""
    names = ("name", "entry", "num_partitions", "num_replicas", "result", "aliases")
    assert [getattr(proto, n) for n in names] == [getattr(text, n) for n in names]
    assert proto.not_understood == text.not_understood == {}
    assert list(proto.computations) == list(text.computations)
    for name, computation in proto.computations.items():
        other = text.computations[name]
        assert list(computation.instructions) == list(other.instructions)
        for one in computation.instructions:
            assert facts(computation.instructions[one]) == facts(other.instructions[one])
    assert proto.collectives == text.collectives
    assert proto.call_sites.keys() == text.call_sites.keys()
    assert proto.unknown_loops == text.unknown_loops


# The sixth one permutes over eight devices.
@pytest.mark.slow
@pytest.mark.parametrize(
    "number", sweep(range(len(PROGRAMS)), quick=range(len(PROGRAMS)), several=[5])
)
def test_proto_and_text_of_a_cpu_program_read_as_equal_modules(number: int) -> None:
    program = compiled(PROGRAMS[number], mesh())
    check_alike(hlo.read(program), of_text(program))


@pytest.mark.slow
@pytest.mark.parametrize("slices", [1, 2])
def test_proto_and_text_of_a_tpu_program_read_as_equal_modules(slices: int) -> None:
    pod = topology("v5e:2x2", slices)
    on = pod.mesh({"data": 2 * slices, "model": 2})

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jax.lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, w)[0].sum()

        return w - jax.grad(loss)(w)

    held = jax.sharding.NamedSharding(on, P(None, "data", "model"))
    w = jax.ShapeDtypeStruct((6, 256, 256), jnp.bfloat16, sharding=held)
    x = jax.ShapeDtypeStruct(
        (512, 256), jnp.bfloat16, sharding=jax.sharding.NamedSharding(on, P("data"))
    )
    program = pjit(step, out_shardings=held, donate_argnums=0).lower(w, x).compile()
    proto = hlo.read(program)
    check_alike(proto, of_text(program))
    # Properties that the analysis of TPU programs relies on.
    instructions = [i for c in proto.computations.values() for i in c.instructions.values()]
    assert any("estimated_cycles" in i.attributes.backend_config for i in instructions)
    assert any(i.shape.memory_space == 1 for i in instructions if i.opcode == "fusion")
    assert {site.times for site in proto.call_sites.values()} >= {1, 6}
    assert any(f.file == __file__ and f.function for i in instructions for f in i.frames)
    assert proto.collectives
    if slices == 1:
        assert all(c.axes(on) for c in proto.collectives)
    assert proto.aliases == {0: 0}


def test_every_source_of_a_program_is_read(tmp_path: Path) -> None:
    program = compiled(scan, mesh())
    executable = program.runtime_executable()
    whole = hlo.read(program)
    (module,) = executable.hlo_modules()
    data, text = module.as_serialized_hlo_module_proto(), module.to_string()
    (tmp_path / "dump.hlo.pb").write_bytes(data)
    (tmp_path / "dump.txt").write_text(text)
    ours = pjit(scan).lower(X, W).compile()
    assert hlo.read(ours).collectives == () and hlo.read(ours).num_partitions == 1
    sources = executable, data, text, tmp_path / "dump.hlo.pb", tmp_path / "dump.txt"
    for source in sources:
        assert list(hlo.read(source).computations) == list(whole.computations)
    assert [m.name for m in hlo.read_modules(text + "\n" + text)] == [whole.name] * 2


@pytest.mark.devices(8)
def test_buffer_assignment_of_a_cpu_program_is_read() -> None:
    program = hlo.read(compiled(scan, mesh()))
    values = [value for a in program.allocations for value in a.values]
    assert {value.name for value in values} <= {
        name for c in program.computations.values() for name in c.instructions
    }
    # Two arguments, the results and their tuple, and temporaries; no heap is traced.
    assert {a.parameter for a in program.allocations} == {None, 0, 1}
    results = [a for a in program.allocations if a.holds_result]
    assert sum(a.size for a in results) == 16 * 4 + 5 * 4 + 2 * 8
    assert any(a.is_temporary and a.values for a in program.allocations)
    assert program.buffers_at_peak() == []


def test_a_loop_of_unknown_trip_count_is_named() -> None:
    program = hlo.read(compiled(until, mesh()))
    (loop,) = program.unknown_loops
    assert loop.startswith("while")
    assert hlo.read(compiled(scan, mesh())).unknown_loops == ()


def test_unrecognized_lines_are_counted() -> None:
    text = """HloModule m, num_partitions=2

FutureTable
1 {a=b}

ENTRY %e {
  %p = f32[4]{0} parameter(0)

  %p2 := f32[4]{0} from tomorrow
  %x = f7[4]{0} frobnicate(%p), to_apply=%gone
  ROOT %r = f32[4]{0} negate(%p)
}
"""
    assert hlo.read(text).not_understood == {
        "line": 3,
        "dtype f7": 1,
        "opcode frobnicate": 1,
        "missing computation gone": 1,
    }


@pytest.mark.parametrize(("source", "facts"), [(3, "int"), ("", "0 HLO modules"), (b"", "Proto")])
def test_source_without_a_module_raises(source: Any, facts: str) -> None:
    with pytest.raises(ArgumentError, match=facts):
        hlo.read(source)


NESTED = message_type(name=(1, str), size=(2, int))
WHOLE = message_type(
    number=(1, int),
    numbers=(2, [int]),
    text=(3, str),
    raw=(20, bytes),
    part=(5, NESTED),
    parts=(300, [NESTED]),
    unread=(301, SerializedFields),
)
UNREAD = message_type(parts=(301, [NESTED]))
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
NESTED_FIELDS = st.fixed_dictionaries({1: st.text(), 2: INTEGERS})


@given(
    INTEGERS,
    st.lists(st.lists(INTEGERS).map(tuple) | INTEGERS),
    NESTED_FIELDS,
    st.lists(NESTED_FIELDS),
)
@example(-1, [1, (2, 300, -1), 1 << 62], {1: "ä", 2: -5}, [])
def test_every_field_of_a_message_is_read(
    number: int, pieces: list[Any], part: dict[int, Any], parts: list[dict[int, Any]]
) -> None:
    fields = {
        9: 7,
        1: [0, number],
        2: pieces,
        3: "first",
        20: b"\xff",
        5: part,
        40: "?",
        301: parts,
        300: parts,
    }
    read = WHOLE(
        encode.message({301: parts}) + encode.message(fields) + b"\x551234" + b"\x5112345678"
    )
    flat = [n for piece in pieces for n in (piece if isinstance(piece, tuple) else [piece])]
    assert (read.number, [*read.numbers], read.text, read.raw) == (number, flat, "first", b"\xff")
    every = [(m.name, m.size) for m in (read.part, *read.parts)]
    assert every == [(fields[1], fields[2]) for fields in (part, *parts)]
    # Fields in two places are one value.
    assert [(m.name, m.size) for m in UNREAD(read.unread).parts] == every[1:] * 2


def test_fields_that_are_not_set_are_empty() -> None:
    read = WHOLE()
    assert (read.number, read.numbers, read.text, read.raw, read.parts) == (0, (), "", b"", ())
    assert (read.part.name, read.part.size, read.part.data) == ("", 0, b"")


INVALID = {
    "a field cut off": (b"\x1a\x03ab", "invalid field 3 at byte 2"),
    "a number cut off": (b"\x08\x80", "cut off after 2 bytes"),
    "a key without its value": (b"\x08", "cut off after 1 bytes"),
    "packed numbers cut off": (b"\x12\x01\x80", "invalid packed numbers of 1 bytes"),
    "a number of eleven bytes": (b"\x08" + b"\xff" * 10 + b"\x01", "invalid number at byte 11"),
    "a packed number of eleven bytes": (
        b"\x12\x0c" + b"\xff" * 12,
        "invalid packed numbers of 12 bytes",
    ),
    "an end of a group": (b"\x0c", "invalid field 1"),
    "field 0": (bytes(4), "invalid field 0"),
    "a number for a text": (b"\x18\x01", "field 3 is not a message or a text"),
    "a text for a number": (b"\x0a\x01a", "field 1 is not a number"),
    "unread fields cut off": (b"\xea\x12\x00\xea\x12\x05", "invalid field 301 at byte 3"),
    "a nested message cut off": (b"\x2a\x01\x10", "cut off after 1 bytes"),
}


@pytest.mark.parametrize("what", INVALID)
def test_an_invalid_message_raises(what: str) -> None:
    data, facts = INVALID[what]
    with pytest.raises(ValueError, match=facts):
        WHOLE(data)
