"""The pictures that the documents show as text are those that their code prints."""

import contextlib
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import xlashard
from tests.analysis.pictures.cases import MESH
from tests.documents import program, read_blocks
from xlashard import NamedSharding, P

ROOT = Path(__file__).resolve().parents[3]


def text_blocks(name):
    blocks = read_blocks((ROOT / name).read_text(encoding="utf-8"))
    return ["\n".join(block.code).rstrip() for block in blocks if block.language == "text"]


@pytest.mark.slow
def test_pictures_page_shows_the_output_of_its_code(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    page = (ROOT / "docs/guides/pictures.md").read_text(encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program(page), "docs/guides/pictures.md", "exec"), {"__name__": "__main__"})
    shown = text_blocks("docs/guides/pictures.md")
    assert len(shown) == 3
    for block in shown:
        assert block in printed.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_first_program_shows_its_picture_at_any_width(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    sharding = NamedSharding(MESH, P("data", "model"))
    x = jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=sharding)
    shown = text_blocks("docs/start/first_program.md")
    assert any(str(xlashard.visualize(x)) in block for block in shown)
