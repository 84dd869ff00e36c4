"""The bound step: state stays on its devices, with the same safety as in pjit."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.pjit.helpers import f32
from tests.message_patterns import naming
from xlashard import Array, BoundStep, Compiled, NamedSharding, P, device_put, pjit
from xlashard.errors import (
    ArgumentError,
    DeletedError,
    DonationError,
    NonFiniteError,
    ResourceError,
)


def update(state, x, scale=1.0):
    new = {"w": state["w"] + x.sum() * scale, "n": state["n"] + 1}
    return new, {"loss": new["w"].sum(), "x": x}


def first():
    return {"w": f32(8, 4), "n": np.int32(0)}


@pytest.fixture(params=["one device", "eight devices"])
def shardings(request, mesh):
    if request.param == "one device":
        return None
    return {"w": NamedSharding(mesh, P("x", "y")), "n": NamedSharding(mesh, P())}


def compiled(shardings, *, donate=True, fun=update):
    keywords = {"donate_argnums": 0} if donate else {}
    if shardings is not None:
        rest = NamedSharding(shardings["n"].mesh, P())
        keywords |= {"in_shardings": (shardings, rest), "out_shardings": (shardings, None)}
    return pjit(fun, **keywords).lower(first(), f32(3)).compile()


@pytest.mark.slow
@pytest.mark.parametrize("donate", [True, False])
def test_bound_step_in_a_loop_equals_the_function(shardings, donate):
    step = compiled(shardings, donate=donate).bind(first())
    assert isinstance(step, BoundStep)
    state = first()
    for i in range(4):
        out = step(f32(3) + i)
        state, wanted = update(state, f32(3) + i)
        assert isinstance(out["loss"], Array)
        np.testing.assert_allclose(out["loss"], wanted["loss"], rtol=1e-6)
        np.testing.assert_array_equal(out["x"], f32(3) + i)
    jax.tree.map(np.testing.assert_allclose, step.state, state)
    if shardings is not None:
        assert step.state["w"].sharding == shardings["w"]


def test_state_is_readable_between_steps(shardings):
    step = compiled(shardings).bind(first())
    np.testing.assert_array_equal(step.state["w"], f32(8, 4))
    step(f32(3))
    before = step.state
    step(f32(3))
    after = step.state
    with pytest.raises(DeletedError, match=naming("donated", "bound step update")):
        np.asarray(before["w"])
    with pytest.raises(DeletedError, match=naming("donated", "bound step update")):
        before["n"] + 1
    assert int(after["n"]) == int(step.state["n"]) == 2
    step(f32(3))
    assert int(step.state["n"]) == 3


def test_undonated_state_stays_usable(shardings):
    step = compiled(shardings, donate=False).bind(first())
    before = step.state
    step(f32(3))
    np.testing.assert_array_equal(before["w"], f32(8, 4))
    assert int(before["n"]) == 0 and int(step.state["n"]) == 1


def test_initial_state_is_donated(shardings):
    program = compiled(shardings)
    placed = jax.tree.map(
        lambda s, x: device_put(x, s),
        program.input_shardings[0][0],
        first(),
    )
    step = program.bind(placed)
    step(f32(3))
    with pytest.raises(DeletedError, match=naming("donated", "bound step update")):
        np.asarray(placed["w"])


def test_host_values_are_not_touched(shardings):
    state = first()
    step = compiled(shardings).bind(state)
    step(f32(3))
    np.testing.assert_array_equal(state["w"], f32(8, 4))


def test_step_without_an_output_returns_none():
    step = pjit(lambda s, x: s + x, donate_argnums=0).lower(0.0, 1.0).compile().bind(0.0)
    for _ in range(3):
        assert step(1.0) is None
    assert float(step.state) == 3.0


def test_no_inputs():
    step = pjit(lambda s: (s * 2, s), donate_argnums=0).lower(f32(3)).compile().bind(f32(3))
    np.testing.assert_array_equal(step(), f32(3))
    np.testing.assert_array_equal(step(), f32(3) * 2)
    np.testing.assert_array_equal(step.state, f32(3) * 4)


def test_several_results():
    fun = pjit(lambda s, x: (s + x, x * 2, {"k": x * 3}))
    step = fun.lower(f32(3), f32(3)).compile().bind(f32(3))
    double, triple = step(f32(3))
    np.testing.assert_array_equal(double, f32(3) * 2)
    np.testing.assert_array_equal(triple["k"], f32(3) * 3)


@pytest.mark.slow
@pytest.mark.parametrize("argnum", [1, 2])
def test_state_may_be_at_any_argument_position(argnum, mesh):
    def fun(*args):
        state, rest = args[argnum], [a for i, a in enumerate(args) if i != argnum]
        return [s + sum(rest) for s in state], rest[0]

    args = [1.0, 2.0, 3.0]
    args[argnum] = [f32(8), f32(8, 2)]
    program = pjit(fun, donate_argnums=argnum).lower(*args).compile()
    step = program.bind(args[argnum], argnum=argnum)
    rest = [a for i, a in enumerate(args) if i != argnum]
    for _ in range(2):
        assert float(step(*rest)) == rest[0]
    np.testing.assert_allclose(step.state[1], f32(8, 2) + 2 * sum(rest))


def test_unused_state_and_unused_inputs():
    def fun(state, x, unused):
        return {"kept": state["kept"], "new": x * 2, "w": state["w"] + x}

    state = {"kept": f32(2), "new": f32(3), "w": f32(3)}
    program = pjit(fun, donate_argnums=0).lower(state, f32(3), f32(5)).compile()
    step = program.bind(state)
    for _ in range(3):
        step(f32(3), f32(5))
    np.testing.assert_array_equal(step.state["kept"], f32(2))
    np.testing.assert_array_equal(step.state["new"], f32(3) * 2)
    np.testing.assert_array_equal(step.state["w"], f32(3) * 4)


@pytest.mark.slow
def test_closed_over_arrays(mesh):
    big = device_put(f32(256, 128))
    table = device_put(f32(8), NamedSharding(mesh, P("x")))
    for closed in (big, table):
        program = (
            pjit(lambda s, x, closed=closed: (s + x * closed.sum(), s)).lower(0.0, 1.0).compile()
        )
        step = program.bind(0.0)
        step(1.0)
        step(2.0)
        np.testing.assert_allclose(step.state, 3 * np.asarray(closed).sum(), rtol=1e-5)


@pytest.mark.slow
def test_inputs_are_moved_to_their_shardings(mesh):
    sharding = NamedSharding(mesh, P("x"))
    program = (
        pjit(lambda s, x: (s + x, x.sum()), in_shardings=sharding, out_shardings=(sharding, None))
        .lower(f32(8), f32(8))
        .compile()
    )
    step = program.bind(f32(8))
    for x in (
        f32(8),
        list(range(8)) and np.asarray(f32(8)),
        jnp.asarray(f32(8)),
        device_put(f32(8), sharding),
        device_put(f32(8), NamedSharding(mesh, P("y"))),
        device_put(f32(8), jax.devices()[3]),
    ):
        np.testing.assert_allclose(step(x), f32(8).sum())


def test_mismatched_inputs_are_refused(shardings):
    step = compiled(shardings).bind(first())
    for call, facts in {
        lambda: step(): "arguments with a tuple of 1, .* a tuple of 0",
        lambda: step(f32(3), 1.0): "a tuple of 2",
        lambda: step({"x": f32(3)}): r"arguments\[0\] with an array, .* a dict of 1",
        lambda: step(f32(4)): r"x as float32\[3\].* float32\[4\]",
        lambda: step(np.arange(3)): r"x as float32\[3\].* int32\[3\].*x\.astype\('float32'\)",
        lambda: step("text"): "x is 'text'",
        lambda: step(np.array(["a"] * 3)): "x .*<U1",
        lambda: step(jax.ShapeDtypeStruct((3,), np.float32)): "x is a ShapeDtypeStruct",
    }.items():
        with pytest.raises(ArgumentError, match=facts):
            call()
    gone = device_put(f32(3))
    gone.delete()
    with pytest.raises(DeletedError, match=r"x \(float32\[3\]\)"):
        step(gone)
    assert int(step.state["n"]) == 0
    step(f32(3))
    assert int(step.state["n"]) == 1


def test_a_step_inside_a_trace(shardings):
    step = compiled(shardings).bind(first())
    with pytest.raises(ArgumentError, match="x is a tracer"):
        jax.jit(lambda x: step(x))(f32(3))
    assert int(step.state["n"]) == 0


def test_bind_refuses_an_invalid_state(shardings):
    program = compiled(shardings)
    for call, facts in {
        lambda: program.bind({"w": f32(8, 4)}): "state with the key 'n', but bind got no 'n'",
        lambda: program.bind(
            {"w": f32(8, 4), "n": 0.5}
        ): r"state\['n'\] as int32\[\].* float32\[\]",
        lambda: program.bind({"w": f32(8), "n": np.int32(0)}): r"state\['w'\] as float32\[8,4\]",
        lambda: program.bind({"w": "text", "n": np.int32(0)}): r"state\['w'\] is 'text'",
        lambda: program.bind(first(), argnum=2): "update .*argument 2.*2 positional",
        lambda: program.bind(first(), argnum=-1): "update .*argument -1",
        lambda: program.bind(f32(3), argnum=1): "update .*return state, out",
    }.items():
        with pytest.raises(ArgumentError, match=facts):
            call()
    state = {"w": device_put(f32(8, 4)), "n": np.int32(0)}
    state["w"].delete()
    with pytest.raises(DeletedError, match=r"state\['w'\]"):
        program.bind(state)


def test_bind_refuses_a_function_without_a_new_state():
    for fun, facts in {
        (lambda s, x: x): "return state, out",
        (lambda s, x: (x, s)): "return state, out",
        (lambda s, x: {"a": s}): "return state, out",
    }.items():
        with pytest.raises(ArgumentError, match=facts):
            pjit(fun).lower({"k": f32(3)}, f32(2)).compile().bind({"k": f32(3)})
    with pytest.raises(
        ArgumentError, match=naming("s ", "float32[3]", "int32[3]", ".astype('float32')")
    ):
        pjit(lambda s: s.astype(int)).lower(f32(3)).compile().bind(f32(3))
    with pytest.raises(ArgumentError, match="keyword"):
        pjit(lambda s, *, x: s + x).lower(f32(3), x=1.0).compile().bind(f32(3))


@pytest.mark.devices(8)
def test_bind_refuses_a_step_that_changes_the_state_sharding(mesh):
    named = NamedSharding(mesh, P("x")), NamedSharding(mesh, P("y"))
    program = pjit(lambda s: s + 1, in_shardings=named[0], out_shardings=named[1])
    with pytest.raises(ArgumentError, match=naming("s ", "P('x',)", "P('y',)", "out_shardings")):
        program.lower(f32(8)).compile().bind(f32(8))


@pytest.mark.devices(8)
def test_bind_refuses_a_state_with_another_committed_sharding(mesh):
    sharding = NamedSharding(mesh, P("x"))
    program = pjit(lambda s: s + 1, in_shardings=sharding, out_shardings=sharding)
    program = program.lower(f32(8)).compile()
    for place in (NamedSharding(mesh, P("y")), jax.devices()[0]):
        with pytest.raises(ResourceError, match=r"s \(float32\[8\]\).*committed.*device_put"):
            program.bind(device_put(f32(8), place))
    program.bind(jnp.asarray(f32(8)))


def test_current_state_as_an_input_is_refused(shardings):
    fun = pjit(lambda s, x: (s + x, x), donate_argnums=0)
    step = fun.lower(f32(4), f32(4)).compile().bind(f32(4))
    step(f32(4))
    with pytest.raises(DonationError, match=naming("buffers", "as s and as x", "jnp.copy(x)")):
        step(step.state)
    step(f32(4))
    np.testing.assert_array_equal(step.state, f32(4) * 3)


def test_bind_refuses_one_array_twice_in_a_donated_state():
    fun = pjit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    x = device_put(f32(4))
    with pytest.raises(DonationError, match=naming("buffers", "as s['a'] and as s['b']")):
        fun.lower({"a": x, "b": x}).compile().bind({"a": x, "b": x})


def test_step_that_fails_after_donating_its_state_raises():
    def fails(v):
        raise ZeroDivisionError("in the callback")

    def fun(s, x):
        shape = jax.ShapeDtypeStruct((), np.float32)
        return s + jax.pure_callback(fails, shape, x), x

    step = pjit(fun, donate_argnums=0).lower(f32(3), 1.0).compile().bind(f32(3))
    with pytest.raises(Exception, match="in the callback"):
        jax.block_until_ready(step(1.0))
        jax.block_until_ready(step.state)
    with pytest.raises(Exception, match="in the callback|state of fun"):
        jax.block_until_ready(step(1.0))


def test_debug_nans(shardings):
    program = pjit(lambda s, x: (s, jnp.log(x))).lower(1.0, 1.0).compile()
    step = program.bind(1.0)
    step(2.0)
    with jax.debug_nans(True), pytest.raises(NonFiniteError, match=r"result\[1\].*nan"):
        step(-1.0)
    assert float(step(1.0)) == 0.0


def test_effects(capfd):
    def fun(s, x):
        jax.debug.print("s {}", s)
        return s + x, x

    step = pjit(fun, donate_argnums=0).lower(0.0, 1.0).compile().bind(0.0)
    for _ in range(3):
        step(1.0)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.splitlines()) == ["s 0.0", "s 1.0", "s 2.0"]


def test_threads(shardings):
    step = compiled(shardings).bind(first())
    with ThreadPoolExecutor(8) as pool:
        # On a busy machine more than about 32 executions in flight hang emulated devices.
        list(pool.map(lambda _: step(np.ones(3, np.float32)), range(24)))
    assert int(step.state["n"]) == 24
    np.testing.assert_allclose(step.state["w"], f32(8, 4) + 24 * 3, rtol=1e-5)


def test_bound_steps_of_one_program_have_separate_states(shardings):
    program = compiled(shardings)
    a, b = program.bind(first()), program.bind(first())
    a(f32(3))
    assert int(a.state["n"]) == 1 and int(b.state["n"]) == 0


def test_layouts(mesh):
    from jax.experimental.layout import Format, Layout

    turned = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh, P("x")))
    fun = pjit(
        lambda s, x: (s + x, x.sum()), in_shardings=(turned, turned), out_shardings=(turned, None)
    )
    step = fun.lower(f32(8, 4), f32(8, 4)).compile().bind(f32(8, 4))
    for _ in range(2):
        step(f32(8, 4))
    np.testing.assert_array_equal(step.state, f32(8, 4) * 3)
    assert step.state.format.layout.major_to_minor == (1, 0)


@pytest.mark.slow
def test_keys(mesh):
    def fun(state, x):
        key, new = jax.random.split(state["key"])
        return {"key": new, "w": state["w"] + jax.random.uniform(key) + x}, x

    state = {"key": jax.random.key(0), "w": np.float32(0)}
    step = pjit(fun, donate_argnums=0).lower(state, 1.0).compile().bind(state)
    wanted = {"key": jax.random.key(0), "w": np.float32(0)}
    for _ in range(3):
        step(1.0)
        wanted, _ = fun(wanted, 1.0)
    np.testing.assert_allclose(step.state["w"], wanted["w"], rtol=1e-6)
    assert jnp.issubdtype(step.state["key"].dtype, jax.dtypes.prng_key)


def test_current_state_as_a_donated_input_is_refused(shardings):
    fun = pjit(lambda s, x: (s + x.sum(), x), donate_argnums=(0, 1))
    step = fun.lower(f32(4), f32(4)).compile().bind(f32(4))
    for _ in range(2):
        step(f32(4))
        with pytest.raises(DonationError, match=naming("buffers", "as s and as x")):
            step(step.state)
    x = device_put(f32(4))
    step(x)
    assert x.is_deleted()
    np.testing.assert_allclose(step.state, f32(4) + 3 * f32(4).sum())


def test_debug_nans_leaves_a_donated_state_intact(shardings):
    fun = pjit(lambda s, x: (s + 1, jnp.log(x)), donate_argnums=0)
    compiled = fun.lower(1.0, 1.0).compile()
    for program in (compiled, Compiled.deserialize(compiled.serialize())):
        step = program.bind(1.0)
        with jax.debug_nans(True), pytest.raises(NonFiniteError):
            step(-1.0)
        step(1.0)
        assert float(step.state) == 2.0
