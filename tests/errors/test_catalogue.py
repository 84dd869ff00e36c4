"""Every mistake is refused as its entry says, its correction runs, and JAX says less."""

import builtins

import jax
import pytest

from tests.errors.catalogue import SETUP, Mistake, read_topics
from tests.errors.comparing import jax_score, our_score
from tests.errors.page import PAGE, jax_version
from tests.errors.running import Outcome, execute, ours, run, theirs
from xlashard import errors

TOPICS = read_topics()


def _marks(mistake: Mistake) -> list[pytest.MarkDecorator]:
    """What starts processes is slow."""
    return [pytest.mark.slow] if "pod(" in mistake.wrong + mistake.right else []


MISTAKES = [
    pytest.param(m, id=f"{t.name}-{m.slug}", marks=_marks(m)) for t in TOPICS for m in t.mistakes
]
WITH_JAX = [param for param in MISTAKES if not param.values[0].no_jax]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_refused_with_place_facts_and_advice(mistake: Mistake) -> None:
    outcome = ours(mistake)
    assert outcome.kind == mistake.error, outcome
    assert mistake.path in outcome.text
    for fact in mistake.facts:
        assert fact in outcome.text
    assert mistake.fix in outcome.text
    assert our_score(mistake, outcome).is_whole


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_corrected_call_runs(mistake: Mistake) -> None:
    assert run(SETUP, mistake.setup + mistake.right) == Outcome()


@pytest.mark.slow  # All together; they tell nothing of this package.
@pytest.mark.parametrize("mistake", WITH_JAX)
def test_jax_says_less(mistake: Mistake) -> None:
    outcome = theirs(mistake)
    score = jax_score(mistake, outcome)
    assert mistake.jax_is_as_good or not score.is_whole, outcome
    if jax.__version__ != jax_version(PAGE.read_text(encoding="utf-8")):
        return
    # What an entry says of JAX is true of the JAX that the page is about.
    assert score.is_whole == mistake.jax_is_as_good, outcome
    assert mistake.jax_path in outcome.text
    assert mistake.jax_fix in outcome.text


def test_every_entry_has_what_an_error_must_say() -> None:
    for topic in TOPICS:
        for mistake in topic.mistakes:
            assert mistake.path and mistake.fix, mistake.title
            assert mistake.wrong.strip() != mistake.right.strip(), mistake.title
            known = hasattr(errors, mistake.error) or hasattr(builtins, mistake.error)
            assert known, mistake.error


def test_what_the_calls_write_goes_with_the_tests(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    (sweep,) = [topic for topic in TOPICS if topic.name == "sweep"]
    folder = execute(SETUP, sweep.setup)["folder"]
    assert folder.is_relative_to(tmp_path_factory.getbasetemp())


def test_titles_are_anchors() -> None:
    slugs = [mistake.slug for topic in TOPICS for mistake in topic.mistakes]
    assert sorted(set(slugs)) == sorted(slugs)
    assert len(slugs) > 200
