"""Every `raise` has an entry in the catalogue, or a comment that exempts it."""

import ast
import inspect

import pytest

from tests.errors.catalogue import read_topics
from tests.errors.running import PACKAGE, ours
from tests.errors.sites import MARKER, Site, raise_sites, read_sites
from xlashard import errors

# They read the sources; what the mistakes do under each partitioner is test_catalogue's.
pytestmark = pytest.mark.own_partitioner

ROOMS = (
    "config.py",
    *(
        f"{room}/**/*.py"
        for room in (
            "_jax",
            "analysis/pictures",
            "analysis/explain",
            "analysis/recompile",
            "core",
            "hlo",
            "legacy",
            "numpy",
            "pods",
            "predict/targets/tpu",
        )
    ),
)


ARITHMETIC = ("sharding_spec.py", "superdims.py")
"""Files of `legacy/shardings` whose errors are tested there, as those of `geometry` are."""


def list_sites() -> list[Site]:
    """Return every `raise` that the catalogue must reach, or that a comment exempts."""
    own_tests = tuple(f"legacy/shardings/{name}" for name in ARITHMETIC)
    return [site for site in raise_sites(*ROOMS) if site.file not in own_tests]


@pytest.fixture(scope="module")
def unhit() -> list[Site]:
    """Return every `raise` that no entry of the catalogue reaches."""
    hit = {place for topic in read_topics() for m in topic.mistakes for place in ours(m).sites}
    return [
        site
        for site in list_sites()
        if not any(site.file == file and site.first <= line <= site.last for file, line in hit)
    ]


@pytest.mark.devices(8)
@pytest.mark.slow
def test_every_check_has_an_entry(unhit: list[Site]) -> None:
    left = [str(site) for site in unhit if not site.exempt]
    assert not left, (
        "no call in tests/errors/mistakes raises these; add an entry for each (and run "
        f"make goldens), or a comment at the raise, `{MARKER} reason`:\n  " + "\n  ".join(left)
    )


@pytest.mark.devices(8)
@pytest.mark.slow
def test_exempt_statements_have_no_entry(unhit: list[Site]) -> None:
    exempt = {site for site in list_sites() if site.exempt}
    assert not [str(site) for site in exempt - set(unhit)], f"an entry raises these; drop {MARKER}"


def test_raise_statements_of_all_packages_are_found() -> None:
    sites = list_sites()
    assert len(sites) > 600
    rooms = {"/".join(site.file.split("/")[:2]) for site in sites}
    assert rooms >= {"core/pjit", "core/sharding", "core/array"}


SOURCE = """\
def f(x):
    if x:
        raise ValueError(  # no-catalogue: needs x
            "long"
        )
    try:
        g(x)
    except KeyError:
        raise
    # no-catalogue: caught
    raise KeyError(x)

def g(x):
    raise TypeError("# no-catalogue: a string")
"""


def test_comment_exempts_the_raise_on_its_line_or_below() -> None:
    first, second, third = read_sites(SOURCE, "a.py")
    assert (first.first, first.last, first.exempt) == (3, 5, "needs x")
    assert (second.source, second.exempt) == ("raise KeyError(x)", "caught")
    assert (third.exempt, str(third)) == (
        "",
        'a.py:14: raise TypeError("# no-catalogue: a string")',
    )


def test_exemption_comment_without_a_raise_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a\.py: lines \[1\]"):
        read_sites("# no-catalogue: reason\nx = 1\n", "a.py")


def _attributes(kind: type) -> set[str]:
    """Return the attributes that a class of `errors` annotates, and that no class of Python has."""
    bases = [base for base in kind.__mro__ if base.__module__ == errors.__name__]
    annotated = {name for base in bases for name in inspect.get_annotations(base)}
    return annotated - {"docs_url", "problem"}


def test_errors_are_raised_with_all_attributes_of_their_class() -> None:
    kinds = {
        name: (attributes, {a for a in attributes if not hasattr(kind, a)})
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and (attributes := _attributes(kind))
    }
    trees = [ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")]
    calls = [
        (call.func.id, {keyword.arg for keyword in call.keywords} - {"also"})
        for tree in trees
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in kinds
    ]
    assert len(calls) > 100
    wrong = [
        (name, given)
        for name, given in calls
        if not kinds[name][1] <= given <= kinds[name][0] and None not in given
    ]
    assert not wrong
