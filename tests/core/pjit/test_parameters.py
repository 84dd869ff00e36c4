"""Static, donated and keyword arguments, and every kind of callable."""

import functools
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xlashard
from tests.core.pjit.helpers import f32, spec_of
from tests.message_patterns import naming
from xlashard import P, device_put, pjit
from xlashard.core.pjit.options import Selected
from xlashard.core.pjit.parameters import Parameters
from xlashard.errors import ArgumentError, ResourceError


def in_specs(f, *args, **kwargs):
    """Return `(positional, keyword)` specs of a function's arguments."""
    positional, keyword = f.lower(*args, **kwargs).compile().input_shardings
    return [s.spec for s in positional], {k: s.spec for k, s in keyword.items()}


def axpy(a, x, y):
    return a * x + y


def test_keyword_argument_uses_the_sharding_of_its_parameter(mesh):
    f = pjit(axpy, in_shardings=(None, P("x"), P("y")))
    with mesh:
        assert in_specs(f, 2.0, y=f32(8), x=f32(8)) == ([P()], {"x": P("x"), "y": P("y")})
        np.testing.assert_allclose(f(2.0, y=f32(8), x=f32(8)), f32(8) * 3)


def test_keyword_only_parameters(mesh):
    def f(x, *, scale):
        return x * scale

    with mesh:
        one = pjit(f, in_shardings=(P("x"),), out_shardings=P("x"))
        np.testing.assert_allclose(one(f32(8), scale=f32(8)), f32(8) ** 2)
        assert in_specs(pjit(f, in_shardings=P("x")), f32(8), scale=f32(8)) == (
            [P("x")],
            {"scale": P("x")},
        )


def test_parameter_with_a_default_needs_no_argument(mesh):
    def f(x, y=2.0):
        return x * y

    with mesh:
        np.testing.assert_allclose(pjit(f, in_shardings=(P("x"), None))(f32(8)), f32(8) * 2)
        with pytest.raises(
            ResourceError, match=naming("in_shardings", "3 entries", "f ", "2 arguments (x, y)")
        ):
            pjit(f, in_shardings=(P("x"), None, None))(f32(8), y=3.0)


@pytest.mark.devices(8)
def test_in_shardings_match_variadic_arguments_by_number(mesh):
    def total(first, *rest):
        return first + sum(rest)

    f = pjit(total, in_shardings=(P("x"), P("y"), None))
    with mesh:
        assert in_specs(f, f32(8), f32(8), f32(8)) == ([P("x"), P("y"), P()], {})
        with pytest.raises(
            ResourceError, match=naming("3 entries", "4 arguments (first, rest[0], ")
        ):
            f(f32(8), f32(8), f32(8), f32(8))
        with pytest.raises(
            ResourceError, match=naming("3 entries", "2 arguments (first, rest[0])")
        ):
            f(f32(8), f32(8))
        with pytest.raises(ResourceError, match=r"in_shardings of rest\[0\] \(float32\[1\]\) "):
            f(f32(8), f32(1), f32(8))


def test_variadic_keywords_need_no_in_shardings_entry(mesh):
    def total(x, **more):
        return x + sum(more.values())

    with mesh:
        np.testing.assert_allclose(
            pjit(total, in_shardings=(P("x"),))(f32(8), b=f32(8), a=f32(8)), f32(8) * 3
        )


class Scale:
    def __init__(self, by):
        self.by = by

    def method(self, x, n):
        return x * self.by * n

    @classmethod
    def of_class(cls, x):
        return x * 3

    @staticmethod
    def static(x):
        return x * 4

    def __call__(self, x):
        return x * self.by


@pytest.mark.devices(8)
def test_bound_methods(mesh):
    f = pjit(Scale(2).method, static_argnums=1, in_shardings=(P("x"),))
    with mesh:
        np.testing.assert_allclose(f(f32(8), 3), f32(8) * 6)
        with pytest.raises(ResourceError, match="in_shardings of x "):
            f(f32(7), 3)
    np.testing.assert_allclose(pjit(Scale.of_class)(f32(3)), f32(3) * 3)
    np.testing.assert_allclose(pjit(Scale.static)(f32(3)), f32(3) * 4)
    np.testing.assert_allclose(pjit(Scale(5))(f32(3)), f32(3) * 5)


def test_a_pjitted_method_of_a_class():
    class Model:
        @functools.partial(pjit, static_argnums=0)
        def apply(self, x):
            return x + 1

    np.testing.assert_allclose(Model().apply(f32(3)), f32(3) + 1)


def test_partials(mesh):
    f = pjit(functools.partial(axpy, 2.0), in_shardings=(P("x"), P("y")))
    g = pjit(functools.partial(axpy, y=1.0), in_shardings=(None, P("x")))
    with mesh:
        assert in_specs(f, f32(8), f32(8)) == ([P("x"), P("y")], {})
        np.testing.assert_allclose(f(f32(8), f32(8)), f32(8) * 3)
        np.testing.assert_allclose(g(3.0, f32(8)), f32(8) * 3 + 1)


@pytest.mark.devices(8)
@pytest.mark.slow
def test_a_callable_without_a_signature(mesh):
    class Bare:
        __signature__ = "none at all"

        def __call__(self, *args):
            return args[0] + args[1]

    f = pjit(Bare(), in_shardings=(P("x"), None), donate_argnums=(0,))
    with mesh:
        assert spec_of(f(jnp.zeros(8), f32(8))) in {("x",), ()}
        with pytest.raises(ResourceError, match=r"in_shardings of args\[0\] "):
            f(f32(7), f32(7))
        with pytest.raises(ResourceError, match=naming("2 entries", "Bare ", "3 arguments")):
            f(f32(8), f32(8), f32(8))


def test_functions_of_jax(mesh):
    with mesh:
        np.testing.assert_allclose(pjit(jnp.add, out_shardings=P("x"))(f32(8), 1.0), f32(8) + 1)


def test_wrapper_has_name_and_repr_of_the_function():
    f = pjit(axpy)
    assert f.__name__ == "axpy" and f.__wrapped__ is axpy
    assert "axpy" in repr(f)


@pytest.mark.slow
@pytest.mark.parametrize(
    "static",
    [{"static_argnums": 1}, {"static_argnums": (-1,)}, {"static_argnames": "n"}],
)
def test_static_arguments(static, compilations):
    def power(x, n):
        assert isinstance(n, int)
        return x**n

    f = pjit(power, **static)
    for n in (2, 3, 2, 3):
        np.testing.assert_allclose(f(f32(4), n), f32(4) ** n, rtol=1e-6)
        np.testing.assert_allclose(f(f32(4), n=n), f32(4) ** n, rtol=1e-6)
    assert compilations.count <= 4


@pytest.mark.devices(8)
def test_static_arguments_have_no_in_shardings_entry(mesh):
    def f(n, x, flag, y):
        return x * n + y if flag else y

    g = pjit(f, in_shardings=(P("x"), P("y")), static_argnums=(0, 2))
    with mesh:
        assert in_specs(g, 3, f32(8), True, f32(8)) == ([P("x"), P("y")], {})
        np.testing.assert_allclose(g(3, f32(8), True, f32(8)), f32(8) * 4)
        with pytest.raises(ResourceError, match="in_shardings of y "):
            g(3, f32(8), True, f32(1))


def test_static_argument_may_be_any_hashable():
    f = pjit(lambda x, how: how(x), static_argnums=1)
    np.testing.assert_allclose(f(f32(3), jnp.sin), np.sin(f32(3)), rtol=1e-6)
    np.testing.assert_allclose(f(f32(3), jnp.cos), np.cos(f32(3)), rtol=1e-6)


def test_an_unhashable_static_argument():
    def f(x, sizes):
        return x

    for g in (pjit(f, static_argnums=1), pjit(f, static_argnames="sizes")):
        with pytest.raises(ArgumentError, match=naming("sizes ", "list", "tuple")):
            g(f32(3), [1, 2])
        with pytest.raises(ArgumentError, match=naming("sizes ", "list", "tuple")):
            g(f32(3), sizes=[1, 2])
        with pytest.raises(ArgumentError, match=naming("sizes ", "list", "tuple")):
            g.lower(f32(3), [1, 2])


@pytest.mark.parametrize("keyword", ["static_argnums", "donate_argnums"])
def test_argnums_out_of_range_are_refused(keyword):
    for wrong in (3, -4, (0, 7)):
        with pytest.raises(
            ArgumentError, match=naming(keyword, "axpy ", "3 positional", "(a, x, y)")
        ):
            pjit(axpy, **{keyword: wrong})


@pytest.mark.parametrize("keyword", ["static_argnames", "donate_argnames"])
def test_unknown_argnames_are_refused(keyword):
    with pytest.raises(ArgumentError, match=naming(keyword, "'yy'", "(a, x, y)", "'y'?")):
        pjit(axpy, **{keyword: ("a", "yy")})

    def anything(x, **more):
        return x

    pjit(anything, **{keyword: "whatever"})


@pytest.mark.parametrize("keyword", ["static_argnums", "donate_argnums"])
@pytest.mark.parametrize("wrong", ["a", 1.0, (0, "a"), True, {"a": 1}])
def test_argnums_that_are_not_ints_are_refused(keyword, wrong):
    with pytest.raises(ArgumentError, match=naming(keyword, "tuple of ints", f"{keyword}=(")):
        pjit(axpy, **{keyword: wrong})


@pytest.mark.parametrize("keyword", ["static_argnames", "donate_argnames"])
@pytest.mark.parametrize("wrong", [1, ("a", 2)])
def test_argnames_that_are_not_strings_are_refused(keyword, wrong):
    with pytest.raises(ArgumentError, match=naming(keyword, "tuple of names", f"{keyword}=(")):
        pjit(axpy, **{keyword: wrong})


def test_argument_both_static_and_donated_is_refused():
    for keywords in (
        {"static_argnums": 0, "donate_argnums": 0},
        {"static_argnames": "a", "donate_argnums": 0},
        {"static_argnums": 0, "donate_argnames": "a"},
        {"static_argnums": -3, "donate_argnums": 0},
    ):
        with pytest.raises(ArgumentError, match=naming("a ", "static", "donate_argnums")):
            pjit(axpy, **keywords)


@pytest.mark.parametrize(
    ("options", "args", "kwargs", "expected"),
    [
        ({"donate_argnums": 0}, (1, [2, 3]), {}, ([1], [2, 3])),
        ({"donate_argnums": (0, 1)}, ([1], 2, 3), {}, ([1, 2], [3])),
        ({"donate_argnums": 1}, (1, 2, 3), {}, ([2], [1, 3])),
        ({"donate_argnums": (0, 1)}, (1,), {"x": 2, "y": 3}, ([1, 2], [3])),
        ({"donate_argnums": (0, 1), "static_argnums": 2}, (1, 2, 3), {}, ([1, 2], [])),
        ({"donate_argnames": "y", "static_argnames": "x"}, (1,), {"x": 2, "y": 3}, ([3], [1])),
    ],
)
def test_leaves_of_donated_arguments(options, args, kwargs, expected):
    donate, static = (
        Selected.of(options.get(f"{what}_argnums"), options.get(f"{what}_argnames"), what)
        for what in ("donate", "static")
    )
    assert Parameters.of(axpy, static, donate).donated_leaves(args, kwargs) == expected


class _Pair(NamedTuple):
    first: Any
    second: Any


def test_results_that_a_call_donates_are_found_given_twice_or_shared():
    make = pjit(lambda x: (x + 1, x + 2))
    parameters = Parameters.of(axpy, Selected(), Selected(argnums=(0,)))
    host, placed = np.ones(2), device_put(np.ones(2, np.float32))
    for arrange, expected in (
        (lambda a, b: ({"w": a, "inner": [_Pair(b, None)]}, placed, host), True),
        (lambda a, b: (_Pair(a, (b, a)),), False),  # twice
        (lambda a, b: ([a, b], [{"w": b}]), False),  # by another argument too
        (lambda a, b: ([a, b, placed],), False),
        (lambda a, b: ([a, b, host],), False),
        (lambda a, b: ([a, b, jax.random.key(0)],), False),
    ):
        a, b = make(placed)
        args = arrange(a, b)
        # A call whose arrays were not donated after all is no reason to refuse the next one.
        assert [parameters.are_exclusive(args, {}) for _ in range(3)] == [expected] * 3
        assert parameters.are_exclusive(([a, b],), {})
        a.reshape(2)
        assert a._exclusive is False and not parameters.are_exclusive(([a, b],), {})


def test_call_without_its_donated_argument_is_refused():
    f = pjit(lambda *args: args[0] * 1, donate_argnums=2)
    with pytest.raises(
        ArgumentError, match=naming("donate_argnums", " 2", "<lambda>", "1 positional")
    ):
        f(f32(3))


def test_static_argument_may_use_its_default():
    def power(x, n=2, *rest):
        return x**n

    for static in ({"static_argnums": 1}, {"static_argnames": "n"}, {"static_argnums": (1, 2)}):
        np.testing.assert_allclose(pjit(power, **static)(f32(3)), f32(3) ** 2)


def test_pjit_refuses_arrays_generators_and_coroutines():
    with pytest.raises(ArgumentError, match=r"pjit\(fun\)\(args\)"):
        pjit(f32(3))

    def generator(x):
        yield x

    async def coroutine(x):
        return x

    for fun in (generator, coroutine):
        with pytest.raises(ArgumentError, match=f"{fun.__name__} function"):
            pjit(fun)


def test_invalid_options_are_refused(mesh):
    with pytest.raises(ArgumentError, match=naming("donation", "'warn' or 'strict'", "'loud'")):
        pjit(axpy, donation="loud")
    with pytest.raises(ArgumentError, match=naming("compiler_options", "dict")):
        pjit(axpy, compiler_options=["xla"])
    with pytest.raises(ArgumentError, match="compiler_options.*names.*3"):
        pjit(axpy, compiler_options={3: True})
    with pytest.raises(ArgumentError, match="device=.*backend="):
        pjit(axpy, device=jax.devices()[0], backend="cpu")
    with pytest.raises(ArgumentError, match=r"SingleDeviceSharding\(device\)"):
        pjit(axpy, device=jax.devices()[0], in_shardings=None)
    with pytest.raises(ArgumentError, match=naming("device ", "jax.Device", "'cpu'")):
        pjit(axpy, device="cpu")
    with pytest.raises(ArgumentError, match="backend.*'quantum'.*cpu"):
        pjit(axpy, backend="quantum")(1.0, 2.0, 3.0)


def test_too_many_and_too_few_arguments():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        pjit(axpy)(1.0, 2.0)
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4 were given"):
        pjit(axpy)(1.0, 2.0, 3.0, 4.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        pjit(axpy)(1.0, 2.0, z=3.0)


def test_pjit_without_a_function_is_a_decorator():
    @pjit(static_argnames="n", donate_argnums=0)
    def power(x, *, n):
        """Some power."""
        return x**n

    x = device_put(f32(4))
    np.testing.assert_array_equal(power(x, n=2), f32(4) ** 2)
    assert x.is_deleted()
    assert power.__name__ == "power" and power.__doc__ == "Some power."
    assert "x, *, n" in str(inspect.signature(power))
    with pytest.raises(ArgumentError, match=naming("pjit ", "function", "NoneType")):
        pjit(donate_argnums=0)(None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "donate"])
@pytest.mark.parametrize(
    "selected",
    [
        {"argnums": 0},
        {"argnames": "a"},
        {"argnums": 0, "argnames": "b"},
        {"argnums": (), "argnames": "a"},
        {"argnums": (0,), "argnames": ("a", "b")},
    ],
    ids=str,
)
def test_argnums_and_argnames_are_inferred_as_in_jax(kind, selected):
    """Names are inferred from positions, and positions from names, if only one of them is given."""
    options = {f"{kind}_{form}": value for form, value in selected.items()}

    def seen(jit):
        traced, outcomes = [], []

        def add(a, b):
            traced.append((type(a), type(b)))
            return a + 1, b + 1

        f = jit(add, **options)
        for by_position in (2, 1, 0):
            values = [1, 2] if kind == "static" else [jnp.ones(3), jnp.ones(3)]
            named = dict(zip(("a", "b")[by_position:], values[by_position:], strict=True))
            f(*values[:by_position], **named)
            outcomes.append([isinstance(v, jax.Array) and v.is_deleted() for v in values])
        return traced, outcomes

    assert seen(pjit) == seen(jax.jit)


def test_errors_are_value_errors_where_jax_raises_value_error() -> None:
    for jit in (jax.jit, xlashard.jit, pjit):
        with pytest.raises(ValueError):
            jit(lambda x: x, static_argnames="missing")(1.0)
        with pytest.raises(ValueError):
            jit(lambda x: x, device=jax.devices()[0], backend="cpu")(1.0)
