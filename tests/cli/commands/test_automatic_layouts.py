"""``xlashard preflight --shardings auto`` on the command line."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.cli.commands.test_preflight import Run, run
from xlashard.auto.auto_program import read_program
from xlashard.auto.choices import LayoutChoice, LayoutReport, predict, prove
from xlashard.cli.commands.automatic_layouts import remat_words, training_choices
from xlashard.cli.commands.preflight import read_reports
from xlashard.errors import ArgumentError
from xlashard.train.config.settings import load_settings

PRODUCT = "tests.cli.commands.programs:product"
AT = "-t", "v5e-4", "--shardings", "auto"
CONFIG = "configs/tiny.toml"

__all__ = ["run"]

WRONG = {
    "another program": ((*AT, PRODUCT, CONFIG), "takes one program, and here are 2"),
    "no program": (AT, "takes one program, and here are 0"),
    "another topology": (
        ("-t", "v5e-4,v5e-8", "--shardings", "auto", PRODUCT),
        "write --topology v5e:2x2",
    ),
    "a comparison": ((*AT, PRODUCT, "--compare"), "--compare is not for --shardings auto"),
    "a profile": ((*AT, PRODUCT, "--measured", "p"), "--measured is not for --shardings auto"),
    "a sweep's folder": ((*AT, PRODUCT, "--folder", "x"), "write --mesh auto"),
    "a report": ((*AT, "a.json"), "a.json is a report of a program that has its layout"),
    "no word of a program": ((*AT, "product"), "'product' is not a program"),
    "a batch of a function": ((*AT, PRODUCT, "--batch", "auto"), "write it with a settings file"),
    "a policy of a function": ((*AT, PRODUCT, "--remat", "full"), "write it with a settings file"),
    "a batch for a layout": (("-t", "v5e-4", CONFIG, "--batch", "auto"), "--shardings auto, too"),
    "a batch of words": ((*AT, CONFIG, "--batch", "16,many"), "('many'): write --batch auto"),
    "no policy": ((*AT, CONFIG, "--remat", "some"), "write --remat auto, or some of custom,none"),
    "no mesh": ((*AT, PRODUCT), "requires a mesh: write --mesh data=4"),
    "a mesh of others": ((*AT, PRODUCT, "--mesh", "data=3"), "--mesh data="),
    "no chips": (("-t", "v9-4", "--shardings", "auto", PRODUCT), "v9"),
    "settings that do not fit": (
        (*AT, CONFIG, "--mesh", "data=4", "--set", "model.heads=3"),
        "= 3",
    ),
    "a stage": (
        (*AT, "tests.cli.commands.programs:lowered", "--mesh", "data=4"),
        "returned a Lowered, which has its layout",
    ),
    "a script": ((*AT, "--", "python", "x.py"), "xlashard.auto_shard in the script"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_arguments_are_refused(run: Run, name: str) -> None:
    words, message = WRONG[name]
    code, _, err = run(*words)
    assert code == 2 and message in err
    assert err.startswith("error: ") and "Traceback" not in err


@pytest.mark.slow
def test_preflight_with_auto_shardings_chooses_a_layout(run: Run, tmp_path: Path) -> None:
    kept, shown = tmp_path / "layout.json", tmp_path / "layout.html"
    words = "--mesh", "data=4", "--estimate", "--json", str(kept), "--html", str(shown)
    code, out, err = run(*AT, PRODUCT, *words)
    assert code == 0, err
    for part in ("Layouts", "Rules", "Memory", "data=4", "tokens/s"):
        assert part in out
    found = LayoutReport.from_json(kept.read_text())
    assert found.tried == () and found.plan.fits and found.report.fits
    assert found.plan.mesh == (("data", 4),)
    # The program prescribes the spec of its result, and leaves that of its argument open.
    assert [value.spec for value in found.plan.outputs] == ["P('data')"]
    assert found.report.is_estimate
    decided = [v.decided_by for v in (*found.report.inputs, *found.report.outputs)]
    assert decided == ["auto", "caller"]
    assert read_reports(str(kept)) == (found.report,)
    page = shown.read_text()
    assert ">Layouts<" in page and ">Time<" in page
    assert json.dumps(found.to_dict()).replace("<", "\\u003c") in page
    code, out, _ = run(*AT, PRODUCT, *words[:3], "--budget", "time=1us")
    assert code == 1


def matmul(rows: int, mesh: dict[str, int]) -> LayoutChoice:
    """Return a product of `rows` rows, on a mesh of two devices if it has no sizes."""

    def make():
        w = jax.ShapeDtypeStruct((512, 512), np.float32)
        x = jax.ShapeDtypeStruct((rows, 512), np.float32)
        return read_program(lambda w, x: jax.numpy.tanh(x @ w), (w, x), {}, mesh, "v5e-4"), rows

    return LayoutChoice(tuple(mesh.items()), make, rows)


@pytest.mark.slow
def test_fitting_batch_with_the_most_tokens_per_second_is_chosen() -> None:
    four = {"data": 4}
    # A device has 3 MiB: 1 MiB of weights, and 8192 rows take 8 MiB of argument and result each.
    share = 3 * 2**20 / 14.2 / 2**30
    predicted = predict(
        [matmul(64, four), matmul(1024, four), matmul(8192, four), matmul(64, {"data": 3})],
        share,
        10.0,
    )
    assert [p.choice.batch for p in predicted] == [1024, 64, 8192, 64]
    best, tried = prove(predicted)
    assert best.choice.batch == 1024
    assert [t.is_chosen for t in tried] == [True, False, False, False]
    outcomes = [t.outcome for t in tried]
    assert outcomes == ["fits", "fits", "out of memory", "refused"]
    assert "too much" in tried[2].verdict and "3" in tried[3].reason
    first, second = tried[0].tokens_per_second, tried[1].tokens_per_second
    assert first is not None and second is not None and first > second
    assert first == pytest.approx(1024 / tried[0].seconds)


def test_training_choices_list_batches_and_remat_policies() -> None:
    assert training_choices(CONFIG, (), "", "") == ([16], ["custom"])
    assert training_choices(CONFIG, (), "auto", "none,full") == ([16, 8, 32, 64], ["none", "full"])
    odd = training_choices(CONFIG, ["training.batch=12", "training.accumulate=4"], "auto", "auto")
    assert odd == ([12, 24, 48], ["custom", "none", "minimal_with_context", "full"])
    assert training_choices(CONFIG, (), "32, 8,32", "")[0] == [32, 8]
    with pytest.raises(ArgumentError, match="--batch 0"):
        training_choices(CONFIG, (), "0", "")
    kept = "model.remat=true", "model.kept=['input']"
    assert load_settings(CONFIG, (*kept, *remat_words("custom"))).model.kept == ("input",)
    none = load_settings(CONFIG, (*kept, *remat_words("none"))).model
    assert (none.remat, none.residuals) == (False, ((), ()))
    full = load_settings(CONFIG, (*kept, *remat_words("full"))).model
    assert (full.remat, full.remat_policy, full.residuals) == (True, "full", ((), ()))
