"""Tables of rules by primitive: reading, writing and searching them, with the arguments of then."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from xlashard._jax.legacy_api import ad, core, mlir
from xlashard.legacy.modules import rule_tables as tables
from xlashard.legacy.modules.interpreters import lower_fun

X = jnp.arange(6.0).reshape(2, 3)


@pytest.fixture
def scaled() -> Iterator[Any]:
    """Return a primitive without batching and transposition rules, which are removed again."""
    primitive = core.Primitive("scaled")
    primitive.def_impl(lambda x, *, by: x * by)
    primitive.def_abstract_eval(lambda x, *, by: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x, *, by: x * by, False))
    yield primitive
    for table in TABLES.values():
        table.pop(primitive, None)


TABLES: dict[str, Any] = {
    "primitive_batchers": tables.primitive_batchers,
    "axis_primitive_batchers": tables.axis_primitive_batchers,
    "spmd_axis_primitive_batchers": tables.spmd_axis_primitive_batchers,
    "primitive_jvps": tables.primitive_jvps,
    "primitive_transposes": tables.primitive_transposes,
    "_lowerings": tables.lowerings,
    "translations": tables.translations,
}


@pytest.mark.parametrize("name", TABLES)
def test_table_is_a_mapping_of_primitives(name: str, scaled: Any) -> None:
    table = TABLES[name]
    table.pop(scaled, None)
    assert scaled not in table and table.get(scaled) is None
    with pytest.raises(KeyError, match="scaled"):
        table[scaled]
    count = len(table)
    table[scaled] = rule = lower_fun(jnp.sin, multiple_results=False)
    assert scaled in table and len(table) == count + 1 and scaled in list(table)
    assert "translations" in name or table[scaled] is rule
    del table[scaled]
    assert scaled not in table and len(table) == count == len(list(table))


@pytest.mark.parametrize(
    ("name", "leading"),
    [
        ("primitive_batchers", ()),
        ("axis_primitive_batchers", (2, "i", None)),
        ("spmd_axis_primitive_batchers", (("data",), 2, "i", None)),
    ],
)
def test_batching_rule_that_wraps_the_one_before_it(
    name: str, leading: tuple[Any, ...], scaled: Any
) -> None:
    table, seen = TABLES[name], []

    def first(*words: Any, by: float) -> Any:
        *given, (x,), (dim,) = words
        seen.append((*given, dim))
        return scaled.bind(x, by=by), dim

    table[scaled] = first
    before = table[scaled]

    def second(*words: Any, **params: Any) -> Any:
        value, dim = before(*words, **params)
        return value + 1, dim

    table[scaled] = second
    mapped = jax.vmap(partial(scaled.bind, by=3.0), in_axes=1, axis_name="i", spmd_axis_name="data")
    assert mapped(X[:, :2]).tolist() == (X[:, :2].T * 3 + 1).tolist()
    assert seen == [(*leading, 1)]


@pytest.mark.parametrize(
    ("primitive", "values", "dims", "params", "expected"),
    [
        (lax.sin_p, (X,), (1,), {"accuracy": None}, jnp.sin(X.T)),
        (lax.mul_p, (X, jnp.ones(2)), (1, None), {}, X.T),
        (lax.reduce_sum_p, (X,), (0,), {"axes": (0,), "out_sharding": None}, X.sum(1)),
    ],
)
@pytest.mark.parametrize("leading", [(), (None, "i", None)])
def test_batching_rules_of_jax_take_the_arguments_of_then(
    primitive: Any, values: Any, dims: Any, params: Any, expected: Any, leading: Any
) -> None:
    size = next(x.shape[dim] for x, dim in zip(values, dims, strict=True) if dim is not None)
    leading = (size, *leading[1:]) if leading else ()
    table = tables.axis_primitive_batchers if leading else tables.primitive_batchers
    value, dim = table[primitive](*leading, values, dims, **params)
    assert jnp.allclose(jnp.moveaxis(value, dim, 0), expected)


def test_transposition_rules_of_jax_return_cotangents() -> None:
    undefined = ad.UndefinedPrimal(core.ShapedArray((3,), jnp.float32))
    rule = tables.primitive_transposes[lax.slice_p]
    (cotangent,) = rule(
        jnp.ones(2), undefined, start_indices=(1,), limit_indices=(3,), strides=None
    )
    assert cotangent.tolist() == [0, 1, 1]
    rule = tables.primitive_transposes[lax.neg_p]
    assert rule(jnp.ones(()), undefined)[0] == -1


def test_rule_that_is_written_is_the_one_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    # JAX has rules of both primitives in tables that it reads first.
    for name in ("primitive_jvps", "primitive_linearizations"):
        monkeypatch.setitem(getattr(ad, name), lax.sin_p, getattr(ad, name)[lax.sin_p])
    for name in ("primitive_transposes", "fancy_transposes"):
        monkeypatch.setitem(getattr(ad, name), lax.mul_p, getattr(ad, name)[lax.mul_p])
    tables.primitive_jvps[lax.sin_p] = lambda xs, ts, **_: (xs[0], lax.mul(ts[0], 7.0))
    assert jax.grad(lax.sin_p.bind)(3.0, accuracy=None) == 7
    tables.primitive_transposes[lax.mul_p] = lambda ct, x, y, **_: (lax.neg(ct), None)
    assert jax.grad(lambda x: lax.mul(x, 7.0))(3.0) == -1


def test_translation_for_one_platform_lowers_there(scaled: Any) -> None:
    rule = lower_fun(lambda x, *, by: x * by + 1, multiple_results=False)
    tables.backend_specific_translations[jax.default_backend()][scaled] = rule
    assert jax.jit(partial(scaled.bind, by=2.0))(3.0) == 7
