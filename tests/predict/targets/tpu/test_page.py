"""The tables of docs/tpu/topologies.md, and the command that makes one of them."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import pytest

from benchmarks import _tpu_modules
from benchmarks._tpu_modules import (
    TARGETS,
    Figures,
    Outcome,
    as_markdown,
    how_alike,
    main,
    outcomes,
)
from benchmarks._tpu_programs import PROGRAMS
from tests.goldens import check_golden
from tests.predict.targets.gpu.plugin import needs_plugin
from xlashard.tpu import GENERATIONS, Generation

PAGE = Path(__file__).resolve().parents[4] / "docs" / "tpu" / "topologies.md"
GIB = 2**30


def between(text: str, name: str, inside: str) -> str:
    """Return the text with something else between two marks."""
    marks = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, _, rest = text.partition(marks[0])
    return f"{before}{marks[0]}{inside}{marks[1]}{rest.partition(marks[1])[2]}"


def row(generation: Generation) -> list[str]:
    peaks = {**dict.fromkeys(("bfloat16", "int8", "float8"), 0.0), **dict(generation.peak_flops)}
    return [
        f"`{generation.name}`",
        f"{generation.pod_chips:,} ({'x'.join(map(str, generation.pod_shape))})",
        f"{generation.chips_per_host}",
        f"{generation.cores_per_chip}",
        f"{generation.devices_per_chip}",
        f"{generation.hbm_bytes / GIB:.0f}",
        f"{generation.available_bytes / GIB:.2f}",
        f"{generation.hbm_bandwidth / 1e9:,.0f}",
        *(f"{peak / 1e12:,.0f}" if peak else "" for peak in peaks.values()),
        f"{generation.ici_links} x {generation.ici_bandwidth / 1e9:.0f}",
        f"{generation.dcn_bandwidth / 1e9:g}" if generation.dcn_bandwidth else "",
    ]


HEAD = [
    *("name", "pod, chips", "chips of a host", "cores of a chip", "devices of a chip"),
    *("HBM of a chip, GiB", "a program may use on a device, GiB", "HBM of a chip, GB/s"),
    *("bf16 TFLOP/s of a chip", "int8", "fp8", "links of a chip, GB/s"),
    "network of a host, GB/s",
]


def test_documented_table_of_generations_is_up_to_date(update_goldens: bool) -> None:
    lines = [HEAD, ["---"] * len(HEAD), *map(row, GENERATIONS)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    text = PAGE.read_text(encoding="utf-8")
    check_golden(PAGE, between(text, "generations", table), update=update_goldens)


@pytest.mark.parametrize("target", TARGETS)
def test_documented_table_lists_every_program_and_topology(target: str) -> None:
    text = (PAGE.parents[1] / target / PAGE.name).read_text(encoding="utf-8")
    table = text.partition("<!-- modules -->")[2].partition("<!-- /modules -->")[0]
    rows = re.findall(r"^\| ([a-z ]+) \|(.*)\|$", table, re.M)
    assert [name for name, _ in rows] == ["program", *PROGRAMS]
    named = list(TARGETS[target])
    assert [re.findall("`(.*?)`", cells) for _, cells in rows[:1]] == [named]
    for _, cells in rows[1:]:
        assert [cell.strip() for cell in cells.split("|")] == ["identical"] * len(named)


CHEAP = ("matmul", "contraction", "mlp gradients", "collectives", "control flow")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["v6e:4x4, 2 slices", "v5p:16x16x24"])
def test_pjit_and_jit_compile_to_identical_modules(where: str) -> None:
    for each in CHEAP if "slices" in where else CHEAP[:2]:
        (outcome,) = outcomes([where], [each])
        assert (outcome.hlo, outcome.worse) == ("identical", [])
        assert outcome.ours == outcome.theirs
        assert outcome.ours.peak > 0
        assert outcome.ours.cycles > 0


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize(("each", "count"), [("matmul", 0), ("collectives", 5)])
def test_pjit_and_jit_compile_to_identical_modules_for_gpus(each: str, count: int) -> None:
    (outcome,) = outcomes(["h100:32x8"], [each])
    assert (outcome.hlo, outcome.worse, outcome.devices) == ("identical", [], 256)
    assert outcome.ours == outcome.theirs
    assert outcome.ours.peak > 0
    # Without cost analysis by the compiler, the time is that of a preflight.
    assert outcome.ours.seconds > 0
    assert len(outcome.collectives) == count


def figures(**changes: float) -> Figures:
    return dataclasses.replace(Figures(cycles=10, seconds=1e-6, accessed=100.0, peak=50), **changes)


class TestOtherModules:
    @pytest.mark.slow
    def test_modules_of_different_operations_differ(self) -> None:
        one, same, other = (
            jax.jit(fun).lower(1.0).compile().as_text() or ""
            for fun in (lambda x: x + 1, lambda x: x + 1, lambda x: x * 2)
        )
        assert how_alike(one, same) == "identical"
        assert how_alike(one, other) == "differs"
        assert how_alike(one, re.sub(r"%(?=\w)", "%other_", one)) == "other names"

    @pytest.mark.parametrize("name", ["cycles", "seconds", "accessed", "peak"])
    def test_regression_returns_exit_code_1(self, name, tmp_path, monkeypatch, capsys) -> None:
        more = figures(**{name: 2 * getattr(figures(), name)})
        better = Outcome("matmul", "v4:4x4x4", 64, "differs", figures(), more, 1.0)
        worse = Outcome("ordering", "v4:4x4x4", 64, "differs", more, figures(), 1.0)
        assert (better.worse, worse.worse) == ([], [name])
        for found, status in (([better], 0), ([better, worse], 1)):
            monkeypatch.setattr(_tpu_modules, "outcomes", lambda *_, found=found: iter(found))
            page = tmp_path / "page.md"
            page.write_text("a\n<!-- modules -->\nold\n<!-- /modules -->\nb\n")
            assert main(["--page", str(page), "--json", str(tmp_path / "out.json")]) == status
            assert page.read_text() == (
                f"a\n<!-- modules -->\n{as_markdown(found)}\n<!-- /modules -->\nb\n"
            )
        assert f"differs, worse: {name}" in as_markdown([worse])
        other = dataclasses.replace(better, collectives=("all-reduce data",))
        assert other.worse == ["collectives"]
        assert "ordering on v4:4x4x4: Figures(" in capsys.readouterr().out
        output = json.loads((tmp_path / "out.json").read_text())
        assert [row["worse"] for row in output["programs"]] == [[], [name]]
