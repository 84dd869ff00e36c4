"""Replacements in the table are code whose names resolve."""

import re

import pytest

from tests.legacy.modules.replacements import lost_names
from xlashard.legacy.modules import Entry, entries

TABLE = tuple(entries().values())


def name_of(entry: Entry) -> str:
    return entry.name


@pytest.mark.parametrize("entry", TABLE, ids=name_of)
def test_names_in_replacement_code_resolve(entry: Entry) -> None:
    assert lost_names(entry.today) == []


@pytest.mark.parametrize("entry", TABLE, ids=name_of)
def test_entry_is_complete(entry: Entry) -> None:
    assert re.fullmatch(r"0\.\d+\.\d+", entry.gone)
    assert entry.name.startswith(("jax.", "jaxlib.", "xlashard."))
    assert entry.treatment == "works" or entry.note


def test_lost_names_returns_unresolvable_names() -> None:
    assert lost_names("jax.tree.map(f, jax.numpy.ones(3))") == []
    assert lost_names("jax.tree.no_such(jax.P('x').no)") == ["jax.tree.no_such"]
    assert lost_names("from jax.sharding import Mesh, no_such") == ["jax.sharding.no_such"]
