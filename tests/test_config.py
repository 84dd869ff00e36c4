"""Environment variables are read in one place, and an error names the right spelling."""

import os
import subprocess
import sys

import pytest

from xlashard.config import (
    Flags,
    describe_unknown_variables,
    read_flags,
    warn_of_unknown_variables,
)
from xlashard.errors import ConfigError, ConfigWarning


@pytest.mark.parametrize(
    ("environment", "flags"),
    [
        ({}, Flags()),
        ({"XLASHARD_PARTITIONER": ""}, Flags()),
        ({"XLASHARD_PARTITIONER": "shardy"}, Flags("shardy")),
        ({"XLASHARD_PARTITIONER": "gspmd"}, Flags("gspmd")),
        ({"XLASHARD_PARTITIONER": " GSPMD "}, Flags("gspmd")),
        ({"XLASHARD_CHECK_DEVICE_PUT": ""}, Flags()),
        ({"XLASHARD_CHECK_DEVICE_PUT": "Always"}, Flags(check_device_put="always")),
        ({"XLASHARD_EXPLAIN_RECOMPILES": ""}, Flags()),
        ({"XLASHARD_EXPLAIN_RECOMPILES": "0"}, Flags()),
        ({"XLASHARD_EXPLAIN_RECOMPILES": "1"}, Flags(explain_recompiles=True)),
        ({"XLASHARD_EXPLAIN_RECOMPILES": " True"}, Flags(explain_recompiles=True)),
        ({"XLASHARD_CHECK_PROGRAMS": ""}, Flags()),
        ({"XLASHARD_CHECK_PROGRAMS": "0"}, Flags(check_programs=False)),
        ({"XLASHARD_PROGRAMS_TIMEOUT": "60"}, Flags(programs_timeout=60)),
        ({"XLASHARD_STRICT": "1"}, Flags(strict=True)),
        ({"XLASHARD_WARN_REPLICATED": ""}, Flags(warn_replicated=64)),
        ({"XLASHARD_WARN_REPLICATED": "0"}, Flags(warn_replicated=0)),
        ({"XLASHARD_DOCS_URL": " file:///site "}, Flags(docs_url="file:///site")),
        ({"XLASHARD_DOCS_URL": ""}, Flags(docs_url="")),
        ({"XLASHARD_SKIP_FILES": ""}, Flags()),
        (
            {"XLASHARD_SKIP_FILES": os.pathsep.join(["layers/*.py", " /src/a.py", ""])},
            Flags(skip_files=("layers/*.py", "/src/a.py")),
        ),
        ({"XLASHARD_TEST_PLATFORM": "cuda", "PATH": "x"}, Flags()),
    ],
)
def test_flags_are_read(environment: dict[str, str], flags: Flags) -> None:
    assert read_flags(environment) == flags


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            {"XLASHARD_PARTITIONER": "gspdm"},
            "XLASHARD_PARTITIONER is 'gspdm'; it must be 'shardy' or 'gspmd': "
            "export XLASHARD_PARTITIONER=gspmd",
        ),
        (
            {"XLASHARD_PARTITIONER": "1"},
            "XLASHARD_PARTITIONER is '1'; it must be 'shardy' or 'gspmd': "
            "export XLASHARD_PARTITIONER=shardy",
        ),
        (
            {"XLASHARD_EXPLAIN_RECOMPILES": "please"},
            "XLASHARD_EXPLAIN_RECOMPILES is 'please'; it must be '1' or '0': "
            "export XLASHARD_EXPLAIN_RECOMPILES=1",
        ),
        (
            {"XLASHARD_PROGRAMS_TIMEOUT": "0"},
            "XLASHARD_PROGRAMS_TIMEOUT is '0'; it must be a number of 1 or more: "
            "export XLASHARD_PROGRAMS_TIMEOUT=1",
        ),
    ],
)
def test_a_wrong_variable_is_refused(environment: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_flags(environment)
    assert str(caught.value) == text


def test_an_unknown_variable_is_a_warning_with_the_nearest_name() -> None:
    known = {"PATH": "x", "XLASHARD_TEST_X": "1", "XLASHARD_STRICT": ""}
    wrong = {"XLASHARD_X": "1", "XLASHARD_PARTITONER": "both"}
    with pytest.warns(ConfigWarning) as caught:
        warn_of_unknown_variables(known | wrong)
    nearest, names = [str(each.message) for each in caught]
    assert "sets XLASHARD_PARTITONER" in nearest
    assert "did you mean XLASHARD_PARTITIONER?" in nearest
    assert "sets XLASHARD_X" in names and "known: XLASHARD_PARTITIONER, " in names
    assert caught[0].filename == __file__
    assert read_flags(known | wrong) == Flags()
    assert describe_unknown_variables(known) == []


SHARDY = "import xlashard, jax; print(jax.config.jax_use_shardy_partitioner)"
TWO_SHAPES = """
import jax, numpy, xlashard
double = {jit}(lambda x: x * 2)
for size in (3, 3, 4):
    double(numpy.ones(size))
"""


def imported(code: str = SHARDY, **environment: str) -> subprocess.CompletedProcess[str]:
    """Import the package in a process of its own and print JAX's setting."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if not k.startswith("XLASHARD_")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("partitioner", "shardy"), [("gspmd", "False"), ("shardy", "True")])
def test_the_variable_chooses_the_partitioner(partitioner: str, shardy: str) -> None:
    other = {"JAX_USE_SHARDY_PARTITIONER": "false" if shardy == "True" else "true"}
    done = imported(XLASHARD_PARTITIONER=partitioner, **other)
    assert done.stdout.strip() == shardy, done.stderr


@pytest.mark.slow
def test_wrong_value_is_reported_when_a_name_is_read() -> None:
    done = imported("import xlashard; xlashard.hlo", XLASHARD_PARTITIONER="both")
    assert done.returncode == 1
    assert "ConfigError: XLASHARD_PARTITIONER is 'both'" in done.stderr
    # The line of the import, and one of the package: no chain of imports.
    assert done.stderr.count('  File "') == 2, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("jit", ["xlashard.pjit", "jax.jit"])
def test_recompilations_are_logged_on_request(jit: str) -> None:
    code = TWO_SHAPES.format(jit=jit)
    silent = imported(code, JAX_PLATFORMS="cpu")
    assert (silent.returncode, silent.stderr) == (0, "")
    done = imported(code, JAX_PLATFORMS="cpu", XLASHARD_EXPLAIN_RECOMPILES="1")
    first, hint = done.stderr.splitlines()
    assert first.startswith("compilation 2 of <lambda> at <string>:5 (")
    assert first.endswith("differs from number 1 in x: float32[3] → float32[4] (shape)")
    assert hint.startswith("  hint: dimension 0 of x had 2 sizes (3, 4): pad it")
