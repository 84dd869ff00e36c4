"""Every mistake is refused as its entry specifies, its correction runs, and JAX reports less."""

import builtins
import pickle
from typing import Any

import jax
import pytest

from tests.device_counts import USUAL
from tests.errors.catalogue import (
    JAX_VERSION,
    SETUP,
    Mistake,
    Topic,
    names_devices,
    read_topics,
)
from tests.errors.comparing import jax_score, our_score
from tests.errors.messages import message, read_messages, write_message
from tests.errors.running import Outcome, execute, ours, run, theirs
from tests.predict.targets.gpu.plugin import marks_of
from xlashard import errors
from xlashard.core.array.array_class import handles
from xlashard.legacy import historic_errors

TOPICS = read_topics()


def _marks(mistake: Mistake) -> list[pytest.MarkDecorator]:
    """Mark entries of eight devices, and those that start processes or copy 64 MiB to each."""
    source = mistake.setup + mistake.wrong + mistake.right + mistake.jax
    is_slow = any(text in mistake.wrong + mistake.right for text in ("pod(", "2**16"))
    marks = [pytest.mark.slow] if is_slow else []
    return [*marks, pytest.mark.devices(USUAL)] if names_devices(source) else marks


def _corrected(mistake: Mistake, name: str) -> Any:
    """Compiling for GPUs needs JAX's plugin."""
    return pytest.param(mistake, id=name, marks=[*_marks(mistake), *marks_of(mistake.setup)])


ALL = [(topic, mistake) for topic in TOPICS for mistake in topic.mistakes]
IDS = [f"{topic.name}-{mistake.slug}" for topic, mistake in ALL]
MESSAGES = [pytest.param(t, m, id=i, marks=_marks(m)) for (t, m), i in zip(ALL, IDS, strict=True)]
MISTAKES = [pytest.param(m, id=i, marks=_marks(m)) for (_, m), i in zip(ALL, IDS, strict=True)]
CORRECTED = [_corrected(mistake, name) for (_, mistake), name in zip(ALL, IDS, strict=True)]
WITH_JAX = [p for p, (_, m) in zip(MISTAKES, ALL, strict=True) if not m.no_jax]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_refused_with_path_facts_and_fix(mistake: Mistake) -> None:
    outcome = ours(mistake)
    assert outcome.kind == mistake.error, outcome
    assert mistake.path in outcome.text
    for fact in mistake.facts:
        assert fact in outcome.text
    assert mistake.fix in outcome.text
    assert our_score(mistake, outcome).is_whole


@pytest.mark.parametrize(("topic", "mistake"), MESSAGES)
def test_message_equals_its_golden(topic: Topic, mistake: Mistake, update_goldens) -> None:
    if update_goldens:
        write_message(topic, mistake)
    assert read_messages(topic.name).get(mistake.title) == message(mistake), "make goldens"


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_every_golden_message_has_an_entry(topic: Topic) -> None:
    titles = [mistake.title for mistake in topic.mistakes]
    assert list(read_messages(topic.name)) == titles, "make goldens"


@pytest.mark.slow  # All together; most of them compile a program.
@pytest.mark.parametrize("mistake", CORRECTED)
def test_the_corrected_call_runs(mistake: Mistake) -> None:
    assert run(SETUP, mistake.setup + mistake.right) == Outcome()


# JAX's own code fails there, on a value that it does not check.
ACCIDENTS = frozenset(
    {
        *("compiler-options-that-are-not-a-dict", "a-sharding-compared-with-a-layout"),
        *("compiling-for-other-devices-than-those-of-the-shardings",),
        *("a-namedsharding-without-a-partitionspec", "a-namedsharding-on-a-list-of-devices"),
        *("an-array-placed-on-an-empty-mesh", "a-memory-kind-that-is-not-a-string"),
        *("the-shard-shape-of-a-shape-with-too-few-dimensions", "a-shape-of-negative-size"),
        *("a-sharding-on-an-abstract-mesh-of-other-axes-than-those-of-the-mesh-in-force",),
        *("a-deleted-array-among-the-single-device-arrays", "a-layout-for-single-device-arrays"),
        *("a-name-in-place-of-a-spec", "a-number-as-the-name-of-a-barrier"),
        *("an-array-constructed-directly", "an-invalid-policy-of-to_host"),
        *("slices-of-an-unreduced-array", "a-reduced-argument-with-an-unreduced-sharding"),
    }
)


# One test for both: each mistake runs with JAX once, whichever worker has the test.
@pytest.mark.own_partitioner
@pytest.mark.slow  # All together.
@pytest.mark.parametrize("mistake", WITH_JAX)
def test_jax_has_fewer_facts_and_its_handlers_catch_the_same_mistake(mistake: Mistake) -> None:
    outcome = theirs(mistake)
    check_handlers_catch(mistake, outcome.cls, ours(mistake).cls)
    score = jax_score(mistake, outcome)
    assert mistake.jax_is_as_good or not score.is_whole, outcome
    if jax.__version__ != JAX_VERSION:
        return
    assert score.is_whole == mistake.jax_is_as_good, outcome
    assert mistake.jax_path in outcome.text
    assert mistake.jax_fix in outcome.text


def check_handlers_catch(
    mistake: Mistake, theirs_cls: type[Exception] | None, our_cls: type[Exception] | None
) -> None:
    """Check that a handler of JAX's error catches that of this package."""
    if theirs_cls is None or our_cls is None or issubclass(our_cls, Warning):
        return
    if theirs_cls.__module__ == "jax._src.dtypes":
        theirs_cls = TypeError  # the only public name of its class for values that are no arrays
    assert issubclass(our_cls, theirs_cls) != (mistake.slug in ACCIDENTS), theirs_cls


def test_errors_of_jax_classes_keep_them_through_pickles() -> None:
    for cls in (errors.CompileError, errors.ShardingTypeError, errors.DuplicateAxisError):
        error = cls("text", also=AssertionError)
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is type(error)
        assert isinstance(copied, AssertionError)
        assert str(copied) == "text"
    assert isinstance(errors.CompileError(""), jax.errors.JaxRuntimeError)
    # Of a class of this package, JAX's class alone joins: handlers read its attributes.
    joined = errors.ResourceError("text", also=errors.DivisibilityError)
    assert not isinstance(joined, errors.DivisibilityError)
    assert type(joined).__mro__[1:3] == (errors.ResourceError, errors.XlashardError)


def test_class_that_python_cannot_join_leaves_the_error_as_it_is() -> None:
    error = errors.LaunchError("text", also=AttributeError)
    assert type(error) is errors.LaunchError
    # KeyError would quote it.
    assert str(errors.ResourceError("text", also=KeyError)) == "text"


def test_every_entry_has_a_path_a_fix_and_a_known_error() -> None:
    for topic in TOPICS:
        for mistake in topic.mistakes:
            assert mistake.path and mistake.fix, mistake.title
            assert mistake.wrong.strip() != mistake.right.strip(), mistake.title
            homes = errors, builtins, historic_errors, handles
            assert any(hasattr(home, mistake.error) for home in homes), mistake.error


def test_sweep_mistakes_write_below_the_temporary_folder_of_pytest(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    (sweep,) = [topic for topic in TOPICS if topic.name == "sweep"]
    folder = execute(SETUP, sweep.setup)["folder"]
    assert folder.is_relative_to(tmp_path_factory.getbasetemp())


def test_slugs_of_titles_are_unique() -> None:
    slugs = [mistake.slug for topic in TOPICS for mistake in topic.mistakes]
    assert sorted(set(slugs)) == sorted(slugs)
    assert len(slugs) > 200
