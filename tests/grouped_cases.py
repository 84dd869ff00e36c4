"""Many cases: small ones in one test, where each failure is named; and a few that stand for all.

A test of pytest costs some milliseconds by itself. Where a case costs less than that, and there are
hundreds, one test goes through all.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tests.device_counts import USUAL


class Together:
    """`with` block whose cases may fail one by one; its end raises all failures."""

    def __init__(self) -> None:
        self._count = 0
        self._failed: list[BaseException] = []

    def __enter__(self) -> "Together":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        assert kind is not None or self._count, "there was no case"
        if self._failed and (kind is None or issubclass(kind, Exception)):
            text = f"{len(self._failed)} of {self._count} cases failed"
            raise BaseExceptionGroup(text, self._failed) from None

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Block whose failure is raised, under its name, when all the others have run."""
        self._count += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"in the case: {name}")
            self._failed.append(error)


def sweep(
    cases: Iterable[Any], *, quick: Collection[Any], several: Collection[Any] = ()
) -> list[Any]:
    """Return cases of `pytest.mark.parametrize`, a few of which run in `make check`.

    Args:
        cases: All of them.
        quick: Those that carry no slow mark.
        several: Those that need the usual number of devices.
    """
    known = list(cases)
    assert all(case in known for case in (*quick, *several)), {*quick, *several} - set(known)
    marked = []
    for case in known:
        marks = [] if case in quick else [pytest.mark.slow]
        marks += [pytest.mark.devices(USUAL)] if case in several else []
        marked.append(pytest.param(case, marks=marks) if marks else case)
    return marked


def at_once(suite: type) -> type:
    """Return a suite that takes many subjects, made of one that takes a single subject.

    Args:
        suite: A class of tests whose parameters are fixtures of the tested subject.

    Returns:
        A class with the same tests. Each takes one fixture, `subjects`: by the name of each case a
        function that makes those fixtures' values.
    """

    def over_all(check: Callable[..., None]) -> Callable[..., None]:
        wanted = [name for name in inspect.signature(check).parameters if name != "self"]

        def test(self: Any, subjects: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
            with Together() as together:
                for name, make in subjects.items():
                    with together.case(name):
                        made = make()
                        check(self, **{wish: made[wish] for wish in wanted})

        test.__name__ = check.__name__
        # What is slow for one subject by itself is not so among many.
        marks = getattr(check, "pytestmark", [])
        test.__dict__["pytestmark"] = [mark for mark in marks if mark.name == "devices"]
        return test

    tests = {
        name: over_all(getattr(suite, name)) for name in dir(suite) if name.startswith("test_")
    }
    return type(suite.__name__, (), tests)
