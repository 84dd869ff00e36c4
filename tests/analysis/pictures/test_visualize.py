"""`visualize`: its arguments, its results and its errors."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import xlashard
from tests.core.array.cases import CONSTRUCTORS, DTYPES, SHAPE, SHARDINGS, value
from xlashard import Mesh, NamedSharding, P, SingleDeviceSharding
from xlashard.core.array.placement import read
from xlashard.errors import ArgumentError, RankError

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES).reshape(2, 4), ("x", "y"))
ROWS = NamedSharding(MESH, P("x"))


@pytest.fixture
def no_reads(monkeypatch):
    """Fail on any transfer of a value to the host."""

    def refuse(*args):
        raise AssertionError("a value was read")

    monkeypatch.setattr(read, "_fetch", refuse)


def array(sharding=ROWS, shape=SHAPE):
    return xlashard.device_put(np.arange(float(np.prod(shape))).reshape(shape), sharding)


THINGS = {
    "an Array": lambda: array(),
    "an array of JAX": lambda: array().to_jax(),
    "a ShapeDtypeStruct": lambda: jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=ROWS),
    "keys": lambda: jax.device_put(
        jax.random.split(jax.random.key(0), SHAPE), jax.sharding.NamedSharding(MESH, P("x"))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("thing", THINGS)
def test_every_type_with_a_sharding_is_drawn(thing, no_reads):
    x = THINGS[thing]()
    text = str(xlashard.visualize(x))
    assert text.startswith(f"{x.dtype.name}[8,16]  P('x') on x=2 × y=4\n")
    assert "CPU 0–3" in text and "CPU 4–7" in text


@pytest.mark.parametrize(
    "shape", [SHAPE, list(SHAPE), (np.int64(8), 16), np.zeros(SHAPE, np.float32)]
)
def test_shapes_and_values_with_a_sharding(shape):
    assert "CPU 4–7" in str(xlashard.visualize(shape, ROWS))


def test_sharding_argument_overrides_that_of_the_array():
    assert "P(None, 'y')" in str(xlashard.visualize(array(), NamedSharding(MESH, P(None, "y"))))


@pytest.mark.parametrize(
    "sharding",
    [
        jax.sharding.NamedSharding(MESH, P("x")),
        jax.experimental.layout.Format(None, ROWS),
    ],
)
def test_other_writings_of_a_sharding(sharding):
    assert str(xlashard.visualize(SHAPE, sharding)) == str(xlashard.visualize(SHAPE, ROWS))


def test_a_device():
    text = str(xlashard.visualize(SHAPE, DEVICES[3]))
    assert text == str(xlashard.visualize(SHAPE, SingleDeviceSharding(DEVICES[3])))
    assert "CPU 3" in text


def test_a_spec_where_a_mesh_is_in_force():
    expected = str(xlashard.visualize(SHAPE, ROWS))
    with jax.set_mesh(MESH):
        assert str(xlashard.visualize(SHAPE, P("x"))) == expected
    with MESH:
        assert str(xlashard.visualize(SHAPE, P("x"))) == expected
    with jax.sharding.use_abstract_mesh(MESH.abstract_mesh):
        assert "#0–3" in str(xlashard.visualize(SHAPE, P("x")))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: xlashard.visualize("x"), ["not str", "visualize(x)", "visualize((8, 16),"]),
        (lambda: xlashard.visualize((8, 2)), ["a shape has no", "visualize((8, 2), Named"]),
        (lambda: xlashard.visualize(np.ones(3)), ["this ndarray has no", "visualize((3,), Named"]),
        (lambda: xlashard.visualize((8,), P("x")), ["P('x')", "jax.set_mesh(mesh)", "Named"]),
        (lambda: xlashard.visualize((8,), 3), ["not int", "NamedSharding(mesh, P('data'))"]),
        (lambda: xlashard.visualize(SHAPE, ROWS, max_tiles=1), ["max_tiles is 1", "2 or more"]),
        (lambda: xlashard.visualize(SHAPE, ROWS, max_tiles=2.5), ["max_tiles is 2.5"]),
        (
            lambda: xlashard.visualize(SHAPE, ROWS).save("x/a.png"),
            ["'x/a.png'", ".svg, .html or .txt", "picture.save('x/a.html')"],
        ),
    ],
)
def test_errors_of_invalid_arguments_suggest_a_fix(call, words):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


def test_spec_of_a_higher_rank_is_refused():
    with pytest.raises(RankError, match=r"2 dimensions.* 1.*P\('x'\)"):
        xlashard.visualize((8,), NamedSharding(MESH, P("x", "y")))


@pytest.mark.slow
@pytest.mark.parametrize("jit", [jax.jit, xlashard.pjit])
def test_error_of_a_traced_array_suggests_working_code(jit):
    with pytest.raises(ArgumentError, match=r"float32\[8,16\].*traced") as caught:
        jit(lambda x: (xlashard.visualize(x), x)[1])(jnp.ones(SHAPE))
    message = str(caught.value)
    advice = message[message.index("jax.debug") : message.index(", which draws it")]
    drawn = []

    def f(x):
        eval(advice, {"jax": jax, "xlashard": xlashard, "print": drawn.append, "x": x})
        return x + 1

    jit(f)(array())
    assert "P('x')" in str(drawn[0]) and "CPU 0–3" in str(drawn[0])


def test_traced_array_on_explicit_axes_has_a_sharding():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    drawn = []

    def f(x):
        drawn.append(str(xlashard.visualize(x)))
        return x

    with jax.set_mesh(mesh):
        jax.jit(f)(jax.device_put(np.ones(SHAPE, np.float32), P("x", "y")))
    assert drawn[0].startswith("float32[8,16]  P('x', 'y') on x=2 × y=4")
    assert "#7" in drawn[0]


def test_print_and_repr_show_equal_text():
    picture = xlashard.visualize(array())
    assert repr(picture) == str(picture)
    assert "\x1b" not in str(picture)
    console = Console(file=io.StringIO(), width=80)
    picture.print(console=console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == str(picture).splitlines()


def test_a_prompt_of_ipython_in_a_terminal_gets_colours(monkeypatch):
    picture = xlashard.visualize(array())

    class Printer(list):
        text = list.append

    plain, coloured = Printer(), Printer()
    picture._repr_pretty_(plain, False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    picture._repr_pretty_(coloured, False)
    assert plain == [str(picture)]
    assert "\x1b[" in coloured[0]


def test_ascii_if_standard_output_is_ascii(monkeypatch):
    class Old(io.StringIO):
        encoding = "ascii"

    monkeypatch.setattr("sys.stdout", Old())
    assert str(xlashard.visualize(array())).isascii()


@pytest.mark.parametrize(
    ("suffix", "start"),
    [(".svg", "<svg "), (".html", "<!DOCTYPE html>"), (".txt", "float32[8,16]")],
)
def test_files_by_suffix(suffix, start, tmp_path):
    picture = xlashard.visualize(array())
    path = tmp_path / f"picture{suffix}"
    picture.save(path)
    assert path.read_text(encoding="utf-8").startswith(start)
    picture.save(str(path))


def test_fewer_tiles_on_request():
    picture = xlashard.visualize((64,), NamedSharding(MESH, P(("x", "y"))), max_tiles=4)
    assert "… 6 more …" in str(picture)
    assert len(list(picture.plan.cells)) == 2


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
@pytest.mark.parametrize("sharding", ["both", "listed tiles", "single", "own", "replicated"])
def test_arrays_have_pictures_in_notebooks(constructor, sharding, no_reads):
    x = CONSTRUCTORS[constructor](value(np.dtype(np.float32)), SHARDINGS[sharding])
    html = x._repr_html_()
    if sharding in ("single", "replicated"):
        assert html is None
        return
    assert "<svg" in html and "float32[8,16]" in html and "<pre" not in html
    assert " B of 512 B" in html


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_arrays_of_every_sharding_in_notebooks(sharding, no_reads):
    x = xlashard.device_put(value(np.dtype(np.int32)), SHARDINGS[sharding])
    several_tiles = x.sharding.shard_shape(SHAPE) != SHAPE
    assert (x._repr_html_() is not None) == several_tiles


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_in_notebooks(dtype, no_reads):
    x = xlashard.device_put(value(DTYPES[dtype]), ROWS)
    assert f"<strong>{dtype}[8,16]" in x._repr_html_()


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 3, 4, 5, 6)])
def test_arrays_of_every_shape_in_notebooks(shape, no_reads):
    x = xlashard.device_put(np.zeros(shape, np.float32), NamedSharding(MESH, P("x")))
    assert f"<strong>float32[{','.join(map(str, shape))}]" in x._repr_html_()


def test_notebook_shows_an_already_read_value():
    x = array()
    assert "<pre" not in x._repr_html_()
    repr(x)
    assert "Array([[  0.," in x._repr_html_()


def test_notebook_shows_nothing_without_a_picture(no_reads, monkeypatch):
    x = array()
    x.delete()
    assert x._repr_html_() is None
    y = array()
    monkeypatch.setattr("xlashard.analysis.pictures.sharding_picture.read_subject", lambda x: 1 / 0)
    assert y._repr_html_() is None


def test_deleted_array_is_drawn_on_its_former_sharding():
    x = array()
    before = str(xlashard.visualize(x))
    x.delete()
    assert str(xlashard.visualize(x)) == before


def test_arrays_without_elements():
    text = str(xlashard.visualize(array(NamedSharding(MESH, P("x", "y")), (0, 16))))
    assert "0 B" in text and "CPU 7" in text


def test_several_pictures_share_a_notebook():
    html = array()._repr_html_() + array(NamedSharding(MESH, P("y")))._repr_html_()
    assert " id=" not in html and "<style" not in html
