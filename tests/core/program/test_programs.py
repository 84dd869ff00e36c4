"""Compiled programs: their results, shardings and properties."""

import re

import jax
import numpy as np
import pytest

import xlashard
from tests.core.program.cases import VALID
from tests.core.program.helpers import (
    U,
    chosen,
    compiled,
    devices,
    identity,
    lower,
    mesh,
    named,
    plan,
    single,
    tiles,
    traced,
    value,
)
from tests.message_patterns import naming
from xlashard import SingleDeviceSharding
from xlashard.core.program import donation
from xlashard.core.program.compile import compile_program
from xlashard.core.program.donation import find_refusals
from xlashard.core.program.lowered import lower_program
from xlashard.core.program.plan import Partitioner
from xlashard.errors import CompileError, DonationError, DonationWarning

ADD = """module {
  func.func public @main(%a: tensor<8x8xf32>, %b: tensor<8x8xf32>) -> tensor<8x8xf32> {
    %0 = stablehlo.add %a, %b : tensor<8x8xf32>
    return %0 : tensor<8x8xf32>
  }
}"""
RUNNABLE = [c for c in VALID if c.name not in ("tokens", "keys", "memories", "donation_unusable")]


def f32(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNNABLE, ids=lambda c: c.name)
def test_golden_module_compiles_with_the_planned_shardings(case, partitioner):
    wanted = case.plan(partitioner)
    program = compiled(case.source, wanted)
    values = [np.ones(v.shape, v.dtype) for v in wanted.args]
    handles = program(values)
    for handle, asked, sharding, sent in zip(
        handles, wanted.results, program.out_shardings, values, strict=True
    ):
        np.testing.assert_array_equal(handle, sent)
        if asked.is_settled:
            assert sharding == asked.sharding
        assert handle.sharding.is_equivalent_to(sharding, handle.ndim)
        shard = handle.addressable_shards[0].data
        assert shard.shape == sharding.shard_shape(asked.shape)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_partitioner_chooses_only_open_dimensions(partitioner):
    open_result = plan(
        [value((8, 8), named("x", "y"))] * 2, [value((8, 8), named(U, None))], partitioner
    )
    _, ((rows, columns),) = chosen(compiled(ADD, open_result))
    assert (rows, columns) == (2, 1)
    open_args = plan(
        [value((8, 8), named(U, None)), value((8, 8))], [value((8, 8), named("x"))], partitioner
    )
    assert chosen(compiled(ADD, open_args)) == (((2, 1), (2, 1)), ((2, 1),))


@pytest.mark.devices(8)
def test_open_shardings_are_read_back_as_specs_on_the_mesh(partitioner):
    on = mesh((2, 2, 2), ("a", "b", "c"))
    wanted = plan(
        [value((8, 8), named(("c", "a"), on=on)), value((8, 8))],
        [value((8, 8))],
        partitioner,
        mesh=on,
    )
    program = compiled(ADD, wanted)
    assert program.in_shardings[1] == named(("c", "a"), on=on)
    assert program.out_shardings == (named(("c", "a"), on=on),)


def test_propagated_shardings_without_a_mesh_stay_gspmd_shardings(partitioner):
    listed = tiles("{devices=[2,4]3,1,2,0,5,4,7,6}")
    wanted = plan([value((8, 8), listed), value((8, 8))], [value((8, 8))], partitioner)
    program = compiled(ADD, wanted)
    assert program.out_shardings[0].is_equivalent_to(listed, 2)
    assert program.in_shardings[1].is_equivalent_to(listed, 2)


@pytest.mark.devices(8)
@pytest.mark.parametrize("count", [1, 3])
def test_single_reported_sharding_applies_to_every_result(partitioner, count):
    wanted = plan(
        [value((8, 8), named("x"))] * count, [value((8, 8))] * count, partitioner, mesh=mesh()
    )
    program = compiled(identity(*["tensor<8x8xf32>"] * count), wanted)
    assert program.out_shardings == (named("x"),) * count


def test_no_results(partitioner):
    source = "module { func.func public @main(%a: tensor<8xf32>) { return } }"
    program = compiled(source, plan([value((8,))], [], partitioner))
    assert program([f32(8)]) == []


def test_one_device_needs_no_partitioner(partitioner):
    wanted = plan([value((8, 8))] * 2, [value((8, 8))], partitioner, count=1)
    program = compiled(ADD, wanted)
    assert program.in_shardings == (single(), single())
    assert isinstance(program.out_shardings[0], SingleDeviceSharding)
    np.testing.assert_array_equal(program([f32(8, 8), f32(8, 8)])[0], 2 * f32(8, 8))


def test_single_device_mesh_gives_named_shardings(partitioner):
    alone = mesh((1, 1), ("x", "y"))
    wanted = plan([value((8, 8))] * 2, [value((8, 8))], partitioner, count=1, mesh=alone)
    program = compiled(ADD, wanted)
    assert program.in_shardings == (named(on=alone),) * 2
    assert program.out_shardings == (named(on=alone),)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_program_runs_on_the_last_devices_in_reverse_order(partitioner):
    last = devices()[:3:-1]
    on = mesh((4,), ("x",), order=(7, 6, 5, 4))
    wanted = plan(
        [value((8, 8), named("x", on=on))] * 2,
        [value((8, 8), named(None, "x", on=on))],
        partitioner,
        on=last,
    )
    (total,) = compiled(ADD, wanted)([f32(8, 8), f32(8, 8)])
    np.testing.assert_array_equal(total, 2 * f32(8, 8))
    placed = {shard.device.id: shard.index[1].start for shard in total.addressable_shards}
    assert placed == {7: 0, 6: 2, 5: 4, 4: 6}


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_memories(partitioner, kind):
    there = named("x", memory_kind=kind)
    wanted = plan(
        [value((8, 8), there, memory_kind=kind), value((8, 8), named("x"))],
        [value((8, 8), named("x")), value((8, 8), there, memory_kind=kind)],
        partitioner,
    )
    program = compiled(identity("tensor<8x8xf32>", "tensor<8x8xf32>"), wanted)
    first, second = program([f32(8, 8), f32(8, 8)])
    assert (first.sharding.memory_kind, second.sharding.memory_kind) == ("device", kind)
    np.testing.assert_array_equal(second, f32(8, 8))


@pytest.mark.slow
def test_layouts(partitioner):
    turned = value((8, 4), named("x"), layout="{0,1}")
    wanted = plan([turned, value((8, 4), named("x"))], [turned, turned], partitioner)
    program = compiled(identity("tensor<8x4xf32>", "tensor<8x4xf32>"), wanted)
    assert [layout and layout.major_to_minor for layout in program.in_layouts] == [(1, 0), None]
    handles = program([f32(8, 4), f32(8, 4)])
    assert [h.format.layout.major_to_minor for h in handles] == [(1, 0), (1, 0)]
    np.testing.assert_array_equal(handles[1], f32(8, 4))
    again = program(handles)
    np.testing.assert_array_equal(again[0], f32(8, 4))


def keys_plan(partitioner, asked, got, ndim=1):
    shape = (8,) if ndim else ()
    return plan(
        [value(shape, asked, "key<fry>", trailing=1, name="keys")],
        [value(shape, got, "key<fry>", trailing=1), value((*shape, 2), None, "uint32")],
        partitioner,
        mesh=mesh(),
    )


KEY_SHARDINGS = {
    "named": lambda: named("x"),
    "open": lambda: named(U),
    "tiles": lambda: tiles("{devices=[8]<=[8]}"),
    "unspecified": lambda: None,
}


@pytest.mark.slow
@pytest.mark.parametrize("got", KEY_SHARDINGS)
@pytest.mark.parametrize("asked", KEY_SHARDINGS)
def test_keys(partitioner, asked, got):
    keys = jax.random.split(jax.random.key(3), 8)
    body, avals = traced(lambda k: (k, jax.random.key_data(k)), keys)
    wanted = KEY_SHARDINGS[got]()
    lowered = lower_program(keys_plan(partitioner, KEY_SHARDINGS[asked](), wanted), body, avals)
    program = compile_program(lowered)
    same, data = program([keys])
    assert same.dtype == keys.dtype
    np.testing.assert_array_equal(data, jax.random.key_data(keys))
    np.testing.assert_array_equal(jax.random.key_data(same), jax.random.key_data(keys))
    if got in ("named", "tiles"):
        assert same.sharding.is_equivalent_to(wanted, 1)


def test_a_single_key(partitioner):
    key = jax.random.key(3)
    body, avals = traced(lambda k: (k, jax.random.key_data(k)), key)
    lowered = lower_program(keys_plan(partitioner, None, None, ndim=0), body, avals)
    _, data = compile_program(lowered)([key])
    np.testing.assert_array_equal(data, jax.random.key_data(key))


@pytest.mark.slow
def test_result_keys_are_not_split_when_their_data_is_sharded(partitioner):
    data = np.arange(16, dtype=np.uint32).reshape(8, 2)
    body, avals = traced(jax.random.wrap_key_data, data)
    wanted = plan(
        [value((8, 2), named("y", "x"), "uint32")],
        [value((8,), None, "key<fry>", trailing=1)],
        partitioner,
        mesh=mesh(),
    )
    program = compile_program(lower_program(wanted, body, avals))
    (keys,) = program([data])
    assert keys.shape == (8,)
    np.testing.assert_array_equal(jax.random.key_data(keys), data)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_argument_keys_are_not_split_when_their_data_is_sharded(partitioner):
    keys = jax.random.split(jax.random.key(3), 8)
    body, avals = traced(jax.random.key_data, keys)
    wanted = plan(
        [value((8,), None, "key<fry>", trailing=1, name="keys")],
        [value((8, 2), named("y", "x", on=mesh()), "uint32")],
        partitioner,
        mesh=mesh(),
    )
    program = compile_program(lower_program(wanted, body, avals))
    assert program.in_shardings[0].rank_tiling(1).num_replicas >= 2
    np.testing.assert_array_equal(program([keys])[0], jax.random.key_data(keys))


@pytest.mark.slow
def test_results_reuse_donated_buffers(partitioner):
    there = named("x")
    wanted = plan(
        [value((8, 8), there), value((8, 8), there)],
        [value((8, 8), there)],
        partitioner,
        donated=(True, False),
    )
    program = compiled(ADD, wanted)
    # Memory of the host may be aliased by a buffer that was only put; these are computed.
    first, second = (h + 1 for h in program.place([f32(8, 8), f32(8, 8)]))
    where = [s.data.unsafe_buffer_pointer() for s in first.addressable_shards]
    out = []
    program.runner(out)([first, second])
    (total,) = program.results(out[0])
    assert (first.is_deleted(), second.is_deleted()) == (True, False)
    assert [s.data.unsafe_buffer_pointer() for s in total.addressable_shards] == where


def test_argument_aliased_by_the_compiler_is_deleted(partitioner):
    wanted = plan(
        [value((8, 8), named("x"))] * 2, [value((8, 8))], partitioner, donated=(True, False)
    )
    program = compiled(ADD, wanted)
    first, second = program.place([f32(8, 8), f32(8, 8)])
    program.runner([])([first, second])
    assert (first.is_deleted(), second.is_deleted()) == (True, False)


def test_runner_can_run_again_after_a_failed_run(partitioner):
    there = named("x")
    wanted = plan([value((8, 8), there)] * 2, [value((8, 8), there)], partitioner, donated=(1, 0))
    program = compiled(ADD, wanted)
    first, second = program.place([f32(8, 8), f32(8, 8)])
    out = []
    run = program.runner(out)
    run([first, second])
    with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
        run([first, second])
    assert len(out) == 1
    run([*out[0], second])
    assert len(out) == 2
    np.testing.assert_array_equal(program.results(out[1])[0], 3 * f32(8, 8))


def unusable(partitioner):
    wanted = plan(
        [value((8,), named("x"), name="state['w']")],
        [value((4,), None)],
        partitioner,
        donated=(True,),
    )
    source = """module { func.func @main(%a: tensor<8xf32>) -> tensor<4xf32> {
      %0 = stablehlo.slice %a [0:4] : (tensor<8xf32>) -> tensor<4xf32>
      return %0 : tensor<4xf32> } }"""
    return lower(source, wanted)


@pytest.mark.devices(8)
def test_an_unusable_donation_is_reported_once(partitioner):
    lowered = unusable(partitioner)
    text = naming("step ", "state['w']: float32[8] as P('x')", "32 bytes", "float32[4], 16 bytes")
    with pytest.warns(DonationWarning, match=text):
        lowered.report_donation("warn", "step")
    lowered.report_donation("warn", "step")


def test_layout_mismatch_makes_a_donation_unusable(partitioner):
    columns = value((8, 4), named("x"), name="x", layout="{0,1}")
    wanted = plan([columns], [value((8, 4), named("x"), name="result")], partitioner)
    reason = str(*find_refusals(wanted, [0], {}))
    assert re.search(naming("result ", "{0,1}", "Format"), reason)


def test_many_unusable_donations_look_at_each_result_once(partitioner, monkeypatch):
    compared, explains = [], donation._NearestResults._explains

    def record(self, argument, j):
        compared.append(j)
        return explains(self, argument, j)

    monkeypatch.setattr(donation._NearestResults, "_explains", record)

    def count(number):
        names = [f"state[{i}]" for i in range(number)]
        wanted = plan(
            [value((8,), named("x"), name=name) for name in names],
            [value((8,), named("x"), name=f"result{name[5:]}", dtype="int32") for name in names],
            partitioner,
        )
        compared.clear()
        reasons = find_refusals(wanted, range(number), {})
        pairs = zip(names, map(str, reasons), strict=True)
        assert all(f"result{name[5:]} " in reason for name, reason in pairs)
        return len(compared)

    assert (count(20), count(40)) == (20, 40)


def test_strict_donation_refuses_an_unusable_donation(partitioner):
    lowered = unusable(partitioner)
    for _ in range(2):
        with pytest.raises(DonationError, match="out of donate_argnums"):
            lowered.report_donation("strict", "step")


def test_unknown_compiler_option_is_named(partitioner):
    wanted = plan([value((8, 8))] * 2, [value((8, 8))], partitioner, name="step")
    with pytest.raises(CompileError, match=r"XLA.* step: .*xla_no_such_option"):
        compiled(ADD, wanted, options=(("xla_no_such_option", 1),))


def test_later_options_override_earlier_options(partitioner):
    wanted = plan(
        [value((8, 8))] * 2, [value((8, 8))], partitioner, options=(("xla_no_such_option", 1),)
    )
    with pytest.raises(CompileError):
        compiled(ADD, wanted)
    known = plan(
        [value((8, 8))] * 2,
        [value((8, 8))],
        partitioner,
        options=(("xla_cpu_enable_fast_math", "nonsense"),),
    )
    assert compiled(ADD, known, options=(("xla_cpu_enable_fast_math", False),))


def test_layout_of_another_rank_raises(partitioner):
    wanted = plan(
        [value((8, 8), layout="{0,1,2}"), value((8, 8))], [value((8, 8))], partitioner, name="step"
    )
    with pytest.raises(CompileError, match="XLA.* step: "):
        compiled(ADD, wanted)


def test_compiling_leaves_the_module_text_unchanged(partitioner):
    wanted = plan([value((8, 8), named("x"))] * 2, [value((8, 8))], partitioner)
    lowered = lower(ADD, wanted)
    before = lowered.as_text()
    for _ in range(2):
        compile_program(lowered)
    assert lowered.as_text() == before


@pytest.mark.devices(8)
def test_partitioner_of_the_plan_overrides_the_jax_config(partitioner):
    other = partitioner is Partitioner.GSPMD
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", other)
    try:
        wanted = plan([value((8, 8), named("x", "y"))] * 2, [value((8, 8))], partitioner)
        _, (result,) = chosen(compiled(ADD, wanted))
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
    assert result == (2, 4)


def test_debug_nans_finds_nan_in_results(partitioner):
    source = """module { func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> {
      %0 = stablehlo.log %a : tensor<8xf32>
      return %0 : tensor<8xf32> } }"""
    wanted = plan([value((8,), named("x"))], [value((8,))], partitioner, name="step")
    program = compiled(source, wanted)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="result holds nan"):
        program([-np.ones(8, np.float32)])
    assert np.isnan(program([-np.ones(8, np.float32)])[0]).all()


def test_ordered_effects_run_in_order(jax_partitioner):
    seen = []

    def step(x):
        jax.experimental.io_callback(lambda v: seen.append(int(v)), None, x.sum(), ordered=True)
        return x + 1

    body, avals = traced(step, f32(2), count=1)
    wanted = plan([value((2,))], [value((2,))], jax_partitioner, count=1)
    program = compile_program(lower_program(wanted, body, avals))
    assert len(body.ordered_effects) == 1
    handle = np.zeros(2, np.float32)
    for _ in range(5):
        (handle,) = program([handle])
    jax.effects_barrier()
    assert seen == [0, 2, 4, 6, 8]


@pytest.mark.slow
def test_effects_on_several_devices(jax_partitioner):
    seen = []

    def step(x):
        jax.debug.callback(lambda v: seen.append(int(v)), x.sum())
        return x + 1

    body, avals = traced(step, f32(8))
    wanted = plan([value((8,), named("x"))], [value((8,), named("x"))], jax_partitioner)
    program = compile_program(lower_program(wanted, body, avals))
    (handle,) = program([f32(8)])
    jax.effects_barrier()
    np.testing.assert_array_equal(handle, f32(8) + 1)
    assert set(seen) == {28}


def test_module_locations_point_to_user_code():
    def scaled(x):
        return 2 * x

    text = xlashard.pjit(scaled).lower(f32(8)).as_text(debug_info=True)
    assert "test_programs.py" in text
    assert "prepare.py" not in text
