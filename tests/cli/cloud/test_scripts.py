"""The scripts of tpu_scripts/: flags, help, dry runs, exit codes."""

import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.cloud.conftest import ROOT, Cloud
from tests.fork_server import python_command
from xlashard.cli.cloud.cloud_settings import CloudSettings
from xlashard.cli.cloud.doctor import check
from xlashard.cli.cloud.jobs import logs, watch
from xlashard.cli.cloud.jobs import run as run_command
from xlashard.cli.cloud.session import Runner, Session, run
from xlashard.cli.cloud.tpu import create, delete
from xlashard.errors import CloudError
from xlashard.train.config.schema import leaves

SCRIPTS = sorted((ROOT / "tpu_scripts").glob("*.py"))
REMOVED = ("wait", "setup", "ssh", "gke")


def call(step, *words: str, groups: tuple[str, ...] = ("tpu", "run")) -> int:
    return run(["script.py", *words], step, groups, "Does something.\n\n  script.py --name=x\n")


def test_flags_override_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[tpu]\nname = "a"\nzone = "z"\n[run]\ngrace = 4.0\ncommand = "true"\n')
    sessions: list[Session] = []

    def step(session: Session) -> int:
        sessions.append(session)
        return 7

    words = (f"--config={path}", "--name=b", "--create_flags=--a=1", "--create_flags=--b")
    assert call(step, *words, "--internal_ips", "--grace=5") == 7
    (session,) = sessions
    tpu = session.settings.tpu
    assert (tpu.name, tpu.zone, tpu.internal_ips) == ("b", "z", True)
    assert tpu.create_flags == ("--a=1", "--b")
    assert (session.settings.run.command, session.settings.run.grace) == ("true", 5.0)
    assert not session.runner.dry


INVALID = {
    "an unknown flag": (
        ("--zome=x",),
        "unrecognized arguments: --zome=x",
    ),
    "an invalid number": (("--grace=two",), "--grace"),
    "a number out of range": (("--grace=0",), "run.grace must be greater than 0"),
    "an invalid choice": (("--capacity=cheap",), "on-demand"),
    "a missing file": (("--config=no.toml",), "--config no.toml can't be read"),
}


@pytest.mark.parametrize(("words", "text"), INVALID.values(), ids=INVALID.keys())
def test_invalid_flags_are_refused(
    words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(lambda session: 0, *words) == 2
    err = capsys.readouterr().err
    assert "error: " in err and text in err and "Traceback" not in err


def test_unknown_setting_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[tpu]\nzome = 'z'\n")
    assert call(lambda session: 0, f"--config={path}") == 2
    assert "tpu.zome is not a setting. Did you mean tpu.zone?" in capsys.readouterr().err


def test_exceptions_of_a_step_determine_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: BaseException):
        def step(session: Session) -> int:
            raise error

        return step

    assert call(fails(CloudError("no capacity"))) == 1
    assert call(fails(CloudError("no name", code=2))) == 2
    assert call(fails(KeyboardInterrupt())) == 130
    err = capsys.readouterr().err
    assert err == "error: no capacity\nerror: no name\nstopped\n"


def test_every_setting_has_a_unique_flag() -> None:
    names = [leaf.path.rpartition(".")[2] for leaf in leaves(CloudSettings)]
    assert len(names) == len(set(names))


def test_help_shows_usage_choices_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(lambda session: 1, "--help") == 0
    out = capsys.readouterr().out
    assert "Does something.\n\n  script.py --name=x\n" in out
    assert "--capacity {on-demand,spot,reserved}" in out
    assert "--internal_ips, --no-internal_ips" in out and "(default: 30.0)" in out
    assert (
        out.index("\n[tpu]") < out.index("--zone ") < out.index("\n[run]") < out.index("--command ")
    )


def test_scripts_have_fewer_than_30_lines() -> None:
    assert {path.stem for path in SCRIPTS} == {
        *("create", "run", "logs", "watch", "delete", "doctor", "jobset", *REMOVED)
    }
    for path in SCRIPTS:
        assert len(path.read_text().splitlines()) < 30, path


MORE = {
    "run": ["--command=true", "--code=tpu_scripts"],
    "watch": ["--command=true", "--code=tpu_scripts"],
    "jobset": ["--image=i", "--command=true"],
}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_starts(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--name=one", "--accelerator=v4-16", "--zone=here", "--dry_run"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(path), *job, *MORE.get(path.stem, [])])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    captured = capsys.readouterr()
    if path.stem in REMOVED:
        assert ended.value.code == 2 and captured.out == ""
        assert captured.err.startswith(f"error: {path.name} was removed: ")
        assert captured.err.count("\n") == 1
    else:
        assert ended.value.code == 0
        assert captured.out.startswith("# ")


@pytest.mark.slow
def test_script_in_a_subprocess_reports_an_invalid_name() -> None:
    words = [*python_command(), str(ROOT / "tpu_scripts" / "create.py"), "--name=My_TPU"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --name='My_TPU' ") and "--name=my-tpu" in done.stderr


INSTALL = ["ssh"] * 2 + ["scp"] * 2 + ["ssh"] * 2
DRY = {
    "create": (create, ["create"]),
    "delete": (delete, ["delete"]),
    "run": (run_command, [*INSTALL, *["ssh"] * 4]),
    "logs": (logs, ["ssh"] * 3),
    "watch": (watch, ["create", *INSTALL, *["ssh"] * 4, "delete"]),
    "doctor": (check, ["ssh"] * 2 + ["scp"] * 2 + ["ssh"] * 6),
}


@pytest.mark.parametrize(("step", "verbs"), DRY.values(), ids=DRY.keys())
def test_a_dry_run_prints_every_command(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], step, verbs: list[str]
) -> None:
    settings = cloud.session(run__command="true", tpu__capacity="spot").settings
    assert step(Session(settings, Runner(dry=True), print)) == 0
    words = shlex.split(capsys.readouterr().out, comments=True)
    starts = [number for number, word in enumerate(words) if word == "gcloud"]
    assert [words[number + 4] for number in starts] == verbs
    assert words.count("--zone=here") == words.count("--quiet") == len(verbs)
