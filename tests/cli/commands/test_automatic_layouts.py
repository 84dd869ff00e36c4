"""``xlashard preflight --shardings auto`` on the command line."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.cli.commands.test_preflight import Run, run
from xlashard.auto.layout_report import LayoutReport
from xlashard.auto.sweep_layouts import try_layouts
from xlashard.cli.commands.automatic_layouts import (
    choice_words,
    choose_program,
    training_choices,
)
from xlashard.cli.commands.preflight import read_reports
from xlashard.cli.main import make_parser
from xlashard.errors import ArgumentError
from xlashard.predict.preflight.mesh_mapping import find_topology
from xlashard.predict.preflight.target_loading import TargetProgram
from xlashard.predict.sweep.evaluate import evaluate_mesh
from xlashard.predict.sweep.sweep_results import SweepFacts, SweepResult
from xlashard.predict.sweep.sweep_run import Sweep, make_request
from xlashard.train.config.settings import load_settings
from xlashard.workers.job_pool import JobPool, WorkerJob

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
    assert found.tried is None and found.plan.fits and found.report.fits
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


def test_fitting_batch_with_the_most_tokens_per_second_is_chosen(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {64: 1.0, 256: 2.0, 8192: 40.0, 16: 0.5}
    tried: list[tuple[int, bool]] = []

    def answer(_: JobPool, jobs: Iterable[WorkerJob]):
        for job in jobs:
            request = job.request
            batch, is_proven = request["batch"], request["target"]["is_proven"]
            tried.append((batch, is_proven))
            nbytes = 2**30 * (20 if batch == 8192 else 1)
            facts = SweepFacts(4, seconds[batch], None, nbytes, 2**34, 0.0, batch / seconds[batch])
            outcome = "out of memory" if batch == 8192 else "fits" if is_proven else "not compiled"
            found = {"outcome": outcome, "reason": "", "facts": asdict(facts), "layout": "data"}
            if dict(request["mesh"])["model"] == 2:
                found = {"outcome": "impossible", "reason": "3 rows"}
            yield job, found

    monkeypatch.setattr(JobPool, "run", answer)
    words = [*AT, CONFIG, "--mesh", "data=..4,model=..2", "--batch", "64,16,8192,256"]
    words += ["--folder", str(tmp_path)]
    arguments = make_parser().parse_args(["preflight", *words])
    program, report = choose_program(arguments, CONFIG, find_topology("v5e-4"))
    assert report is not None and report.best is not None
    assert [r.batch for r in report.fitting] == [256, 64, 16]
    assert report.best.batch == 256 and program.workload is not None
    assert program.workload.tokens == 256 * 128
    outcomes = [r.outcome for r in report.results]
    assert outcomes == ["fits", "fits", "fits", "out of memory", "impossible"]
    # Predictions of all, and programs of the three most promising ones.
    assert sorted(batch for batch, is_proven in tried if is_proven) == [16, 64, 256]
    # What is known is not tried again.
    count = len(tried)
    assert choose_program(arguments, CONFIG, find_topology("v5e-4"))[1] == report
    assert len(tried) == count


@pytest.mark.slow
def test_layouts_of_a_candidate_are_predicted_and_proven() -> None:
    def judge(rows: int, *, is_proven: bool):
        w = jax.ShapeDtypeStruct((512, 512), np.float32)
        x = jax.ShapeDtypeStruct((rows, 512), np.float32)
        program = TargetProgram(lambda w, x: jax.numpy.tanh(x @ w), None, (w, x))
        # A device has 3 MiB: 1 MiB of weights, and 8192 rows take 8 MiB of argument and of result.
        target = {"memory": 3 * 2**20 / 14.2 / 2**30, "seconds": 10.0, "is_proven": is_proven}
        sweep = Sweep("t", target, (place,))
        return evaluate_mesh(
            make_request(sweep, place, {"data": 4}), lambda *_: program, try_layouts
        )

    place = find_topology("v5e-4")
    predicted, proven = judge(1024, is_proven=False), judge(1024, is_proven=True)
    assert (predicted["outcome"], proven["outcome"]) == ("not compiled", "fits")
    assert proven["layout"] and proven["facts"]["seconds"] > 0
    large = judge(8192, is_proven=True)
    assert large["outcome"] == "out of memory" and large["reason"].endswith("of 3.3 MiB")
    assert judge(8192, is_proven=False)["reason"].endswith("of 3.3 MiB predicted")
    assert judge(1023, is_proven=False)["outcome"] in ("not compiled", "impossible")


def test_training_choices_list_batches_and_remat_policies() -> None:
    assert training_choices(CONFIG, (), "", "") == ([16], ["custom"])
    assert training_choices(CONFIG, (), "auto", "none,full") == ([16, 8, 32, 64], ["none", "full"])
    odd = training_choices(CONFIG, ["training.batch=12", "training.accumulate=4"], "auto", "auto")
    assert odd == ([12, 24, 48], ["custom", "none", "minimal_with_context", "full"])
    assert training_choices(CONFIG, (), "32, 8,32", "")[0] == [32, 8]
    with pytest.raises(ArgumentError, match="--batch 0"):
        training_choices(CONFIG, (), "0", "")

    def policy_words(policy: str) -> tuple[str, ...]:
        return choice_words(SweepResult("", "v5e:2x2", 1, (), "fits", remat=policy))

    kept = "model.remat=true", "model.kept=['input']"
    assert load_settings(CONFIG, (*kept, *policy_words("custom"))).model.kept == ("input",)
    none = load_settings(CONFIG, (*kept, *policy_words("none"))).model
    assert (none.remat, none.residuals) == (False, ((), ()))
    full = load_settings(CONFIG, (*kept, *policy_words("full"))).model
    assert (full.remat, full.remat_policy, full.residuals) == (True, "full", ((), ()))
