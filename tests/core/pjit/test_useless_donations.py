"""Donated arguments whose buffers no result can reuse: one warning, or an error."""

import threading
import warnings

import jax
import numpy as np
import pytest

from tests.core.pjit.helpers import f32
from tests.grouped_cases import sweep
from tests.message_patterns import naming
from xlashard import NamedSharding, P, device_put, pjit, with_sharding_constraint
from xlashard.errors import DeletedError, DonationError, DonationWarning


def test_donated_argument_without_a_matching_result_warns_once(place):
    def total(state):
        return state["w"].sum()

    f = pjit(total, donate_argnums=0)
    facts = naming("total ", "state['w']: float32[8,4]", "128 bytes", "result: float32[]")
    with pytest.warns(DonationWarning, match=facts) as caught:
        f({"w": place(f32(8, 4))})
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f({"w": place(f32(8, 4))})
        f.lower({"w": place(f32(8, 4))}).compile()


def test_strict_donation_raises_before_compiling(place, compilations):
    f = pjit(lambda x, y: (x[:2], y), donate_argnums=(0, 1), donation="strict")
    for _ in range(2):
        x, y = place(f32(8)), place(f32(16))
        with pytest.raises(DonationError, match=naming("x: float32[8]", "32 bytes")):
            f(x, y)
        assert not x.is_deleted() and not y.is_deleted()
    with pytest.raises(DonationError):
        f.lower(x, y).compile()
    assert compilations.count == 0


def test_an_unused_donated_argument(place):
    f = pjit(lambda x, y: y * 2, donate_argnums=0)
    x = place(f32(8))
    facts = r"x: float32\[8\].*\bus"
    with pytest.warns(DonationWarning, match=facts):
        out = f(x, f32(8))
    np.testing.assert_array_equal(out, f32(8) * 2)
    assert not x.is_deleted()
    x.delete()
    with pytest.raises(DeletedError, match=r"delete\(\)"):
        x + 1
    x = place(f32(8))
    kept = pjit(
        lambda x, y: y * 2,
        donate_argnums=0,
        keep_unused=True,
        donation="strict",
        out_shardings=x.sharding,
    )
    np.testing.assert_array_equal(kept(x, f32(8)), f32(8) * 2)
    assert x.is_deleted()


def test_useless_donations_under_vmap_are_reported(place):
    with pytest.warns(DonationWarning, match=naming("total ", "x: float32[8,3]", "96 bytes")):
        jax.vmap(pjit(total, donate_argnums=0))(place(f32(8, 3)))
    with pytest.raises(DonationError, match=naming("x: float32[8,3]", "96 bytes")):
        jax.vmap(pjit(total, donate_argnums=0, donation="strict"))(place(f32(8, 3)))


def total(x):
    return x.sum()


def one_warning(call):
    """Return the text of the only DonationWarning of a call, which a second call doesn't repeat."""
    with pytest.warns(DonationWarning) as caught:
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    (warning,) = caught
    assert warning.filename == __file__
    return str(warning.message)


def reasons(mesh):
    """Return functions, arguments of which the first is donated, and why it is not reused."""
    named = lambda *spec, **rest: NamedSharding(mesh, P(*spec), **rest)  # noqa: E731
    rows = lambda: device_put(f32(8, 4), named("x"))  # noqa: E731
    return {
        "shape": (
            lambda x, y: {"s": x.sum(), "t": y[:2]},
            {},
            (f32(8, 4), f32(8)),
            "x: float32[8,4]: no result has its shape [8, 4] or its 128 bytes; the nearest is "
            "result['t']: float32[2], 8 bytes",
        ),
        "nothing": (
            lambda x: None,
            {"keep_unused": True},
            (f32(3),),
            "the function returns no array",
        ),
        "dtype": (
            lambda x: {"h": x.astype(np.float16)},
            {},
            (f32(8, 4),),
            "result['h'] has its shape, but is float16: return it as .astype('float32')",
        ),
        "sharding": (
            lambda x: x + 1,
            {"out_shardings": named("x", "y")},
            (rows(),),
            "x: float32[8,4] as P('x'): result has its type, but is sharded as P('x', 'y'), 16 "
            "bytes on each device, and the argument as P('x'), 32 bytes on each device: pass x as "
            "P('x', 'y')",
        ),
        "memory": (
            lambda x: x + 1,
            {"out_shardings": named("x", memory_kind="unpinned_host")},
            (rows(),),
            "but is in the memory unpinned_host, and the argument in device: give out_shardings "
            "with memory_kind='device'",
        ),
        "taken": (
            lambda x, y: x + y,
            {"donate_argnums": (0, 1), "out_shardings": named("x")},
            (rows(), rows()),
            "y: float32[8,4] as P('x'): result: float32[8,4] as P('x') has room for it, but takes "
            "over the buffers of x already",
        ),
        "the partitioner's choice": (
            lambda x: with_sharding_constraint(x * 2, named()),
            {},
            (rows(),),
            "result has its type, but is sharded as P(), 128 bytes on each device, and the "
            "argument as P('x'), 32 bytes on each device: give out_shardings=P('x') for result",
        ),
    }


REASONS = ("shape", "nothing", "dtype", "sharding", "memory", "taken")


@pytest.mark.parametrize("name", sweep(REASONS, quick=REASONS, several=("sharding", "taken")))
def test_warning_and_strict_error_give_the_reason(mesh, name):
    function, keywords, args, reason = reasons(mesh)[name]
    keywords = {"donate_argnums": 0} | keywords
    f = pjit(function, **keywords)
    message = one_warning(lambda: f.lower(*args).compile())
    assert reason in message
    assert f"{function.__name__} got a donated argument whose buffers" in message
    strict = pjit(function, donation="strict", **keywords)
    for _ in range(2):
        with pytest.raises(DonationError) as caught:
            strict.lower(*args).compile()
        assert str(caught.value) == message


@pytest.mark.devices(8)
def test_partitioner_choice_may_make_a_donation_unusable(mesh, partitioner):
    function, _, (x,), reason = reasons(mesh)["the partitioner's choice"]
    f = pjit(function, donate_argnums=0)
    assert reason in one_warning(lambda: f(x))
    assert not x.is_deleted()
    assert f.lower(x).compile().memory_analysis().alias_size_in_bytes == 0
    strict = pjit(function, donate_argnums=0, donation="strict")
    for call in (strict, strict, lambda x: strict.lower(x).compile()):
        with pytest.raises(DonationError, match=naming("x: float32[8,4]", "out_shardings=P('x')")):
            call(x)
        assert not x.is_deleted()


def test_concurrent_calls_warn_once(mesh):
    f = pjit(lambda x: x.sum(), donate_argnums=0)
    start = threading.Barrier(8)

    def call():
        start.wait()
        f(f32(8, 3))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(issubclass(w.category, DonationWarning) for w in caught) == 1
