"""Small programs from code of 2022 and 2023, which check themselves."""

from pathlib import Path

import pytest

from tests.core.processes import run_pod
from tests.legacy.programs import ALONE, MODULE_OF_THE_RUNNER
from xlashard.pods.testing.supervision import EndingRules

pytestmark = pytest.mark.integration

FOLDER = Path(__file__).parent / "snippets"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "everything")


@pytest.mark.parametrize("jax_array", ["1", "0"], ids=["array", "no_array"])
def test_every_snippet_runs(jax_array: str) -> None:
    words = ["-m", MODULE_OF_THE_RUNNER, str(FOLDER / "everything.py")]
    done = run_pod(words, ALONE, EndingRules(240), JAX_ARRAY=jax_array)
    assert done.verdict.well, done.report()
    (output,) = done.outputs
    assert "`with mesh:`" not in output, "advice to rewrite what stays as it is"
    assert [line for line in output.splitlines() if line.startswith("ran ")] == [
        f"ran {name}" for name in NAMES
    ]
