"""The command line in a process of its own, as users run it."""

import importlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import xlashard as xs
from tests.fork_server import python_command
from tests.without_jax import HAS_JAX
from xlashard.cli.commands import doctor as installation
from xlashard.cli.commands.doctor_checks import Check
from xlashard.cli.main import main, make_parser
from xlashard.cli.parsers.program_parsers import split_script

if HAS_JAX:
    import jax

    from xlashard.pods.testing.emulated_devices import DEVICE_COUNT_FLAG

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    "compile",
    "completion",
    "doctor",
    "explain",
    "hosts",
    "legacy",
    "pod",
    "preflight",
    "reshard-checkpoint",
    "run",
    "train",
]
TINY = str(ROOT / "configs" / "tiny.toml")
SMALL = [
    *("model.layers=1", "model.width=32", "model.heads=4", "model.kv_heads=2", "model.mlp=32"),
    *("model.length=16", "training.batch=8", "training.eval_batches=1", "generation.bytes=5"),
]


def environment() -> dict[str, str]:
    """Return the environment of this process without its choice of devices."""
    kept = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    flags = [flag for flag in kept["XLA_FLAGS"].split() if DEVICE_COUNT_FLAG not in flag]
    paths = filter(None, (str(ROOT), kept.get("PYTHONPATH")))
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": " ".join(flags),
    }


def command(*words: str) -> list[str]:
    return [*python_command(environment()), "-m", "xlashard", *words]


def xlashard(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", ["tiny", "tiny_dp", "tiny_tp"])
def test_train_writes_its_results(tmp_path: Path, config: str) -> None:
    words = [word for word in SMALL if config != "tiny_tp" or not word.startswith("model.heads")]
    path = str(ROOT / "configs" / f"{config}.toml")
    done = xlashard("train", "--config", path, "--steps", "3", "--set", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "8 emulated devices" in done.stdout
    assert "step 3/3 · loss" in done.stdout
    assert "\x1b" not in done.stdout
    folder = tmp_path / "runs" / config
    assert {x.name for x in folder.iterdir()} == {
        "checkpoints",
        "config.toml",
        "loss.png",
        "metrics.jsonl",
    }
    assert "steps = 3" in (folder / "config.toml").read_text()


@pytest.mark.slow
def test_train_options_select_data_and_output_folder(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("one two three four " * 60)
    done = xlashard(
        *("train", "--config", TINY, "--data", "own.txt", "--name", "mine", "--runs", "out"),
        *("--steps", "1", "--set", *SMALL, "--set", "run.seed=3"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "own.txt" in done.stdout
    resolved = (tmp_path / "out" / "mine" / "config.toml").read_text()
    assert 'paths = ["own.txt"]' in resolved
    assert "seed = 3" in resolved


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    words = command(
        *("train", "--config", TINY, "--steps", "100000", "--set", *SMALL),
        *("training.log_every=1", "training.eval_every=0"),
    )
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if line.startswith("step") and re.search(r"\b3/100000", line):
            process.send_signal(signal.SIGINT)
            break
    shown += process.stdout.read()
    assert process.wait(timeout=60) == 130
    assert "SIGINT: stopping ..." in shown
    assert "xlashard train --resume runs/tiny" in shown
    assert "Traceback" not in shown
    folder = tmp_path / "runs" / "tiny"
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["interrupted"] is True
    assert lines[-1]["steps"] >= 3
    assert (folder / "loss.png").exists()


def stdout_and_code(
    capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[str, str, int | str | None]:
    try:
        code: int | str | None = main(words)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return out, err, code


def test_help_names_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    out, _, code = stdout_and_code(capsys, "--help")
    assert code == 0
    assert "train" in out
    out, _, code = stdout_and_code(capsys, "train", "--help")
    assert code == 0
    for option in (
        "--config",
        "--resume",
        "--data",
        "--set",
        "--name",
        "--steps",
        "--runs",
        "--keys",
    ):
        assert option in out


def sections(text: str) -> dict[str, list[str]]:
    """Return the lines below each heading of a help text, by heading."""
    found: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        heading, *lines = block.strip().splitlines()
        if lines and all(line.startswith("  ") for line in lines):
            found[heading] = lines
    return found


def test_help_lists_each_command_once_below_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    out, _, _ = stdout_and_code(capsys, "--help")
    tasks = sections(out)
    del tasks["options:"]
    listed = [
        line.split()[0]
        for lines in tasks.values()
        for line in lines
        if not line.strip().startswith("$ ")
    ]
    assert len(tasks) == 7
    assert sorted(listed) == sorted(set(listed)) == COMMANDS
    assert max(map(len, out.splitlines())) <= 100


def test_help_has_an_example_of_each_command_that_parses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, _, _ = stdout_and_code(capsys, "--help")
    examples = [shlex.split(line)[1:] for line in out.splitlines() if line.strip().startswith("$")]
    parsed = [make_parser().parse_args(split_script(words[1:])[0]).command for words in examples]
    assert {words[0] for words in examples} == {"xlashard"}
    assert sorted(parsed) == COMMANDS
    named = {word for words in examples for word in words if word.startswith("configs/")}
    assert named and all((ROOT / word).exists() for word in named)


def test_wrong_use_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    _, err, code = stdout_and_code(capsys, "tarin")
    assert code == 2
    assert err.startswith("usage: xlashard COMMAND")
    assert "'tarin'" in err and "did you mean train?" in err
    _, err, code = stdout_and_code(capsys, "zzz")
    assert code == 2 and all(name in err for name in COMMANDS)


def test_missing_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    out, err, code = stdout_and_code(capsys)
    assert (out, code) == ("", 2)
    assert all(f"  {name} " in err for name in COMMANDS)


@pytest.mark.needs_jax
def test_version_names_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    out, _, code = stdout_and_code(capsys, "--version")
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert code == 0
    assert lines["xlashard"] == xs.__version__
    assert lines["jax"] == jax.__version__
    assert set(lines) == {"xlashard", "jax", "jaxlib", "libtpu", "Python"}


def console_script(folder: Path) -> list[str]:
    script = folder / "xlashard"
    script.write_text("import sys\nfrom xlashard.cli.main import main\nsys.exit(main())\n")
    return [str(script)]


@pytest.mark.needs_jax
@pytest.mark.parametrize("start", ["module", "script"])
def test_help_imports_no_heavy_modules(tmp_path: Path, start: str) -> None:
    words = ["-m", "xlashard"] if start == "module" else console_script(tmp_path)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words, "preflight", "--help"],
        # Without variables of xlashard, which are read and checked.
        env={k: v for k, v in environment().items() if not k.startswith("XLASHARD_")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--topology" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "xlashard.cli.main" in loaded
    heavy = ("jax", "numpy", "rich", "optax", "matplotlib", "dataclasses", "xlashard._jax")
    assert not {name for name in loaded if name.startswith(heavy)}


INVALID = """
import sys
sys.argv = ["bin/xlashard", "train", "--keys"]
from xlashard.cli.main import main
sys.exit(main())
"""


@pytest.mark.slow
def test_invalid_variable_is_an_error_of_the_command_line() -> None:
    done = subprocess.run(
        [*python_command(environment()), "-c", INVALID],
        env=environment() | {"XLASHARD_STRICT": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: XLASHARD_STRICT is")
    assert "Traceback" not in done.stderr


@pytest.mark.needs_jax
def test_keys_are_printed_with_type_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    out, _, code = stdout_and_code(capsys, "train", "--keys")
    assert code == 0
    assert "model.layers = 4  # an integer: transformer layers" in out.splitlines()


@pytest.mark.needs_jax
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["--config configs/tiny.toml"]),
        (["--config", "nowhere.toml"], ["settings file nowhere.toml does not exist"]),
        (["--config", TINY, "--set", "model.layer=4"], ["--set model.layers=4"]),
        (["--config", TINY, "--steps", "0"], ["training.steps must be at least 1"]),
        (["--config", TINY, "--set", "mesh.data=3"], ["takes 12 devices", "emulate = 12"]),
        (["--config", TINY, "--data", "nowhere.txt"], ["nowhere.txt does not exist"]),
        (["--config", TINY, "--resume", "runs/tiny"], ["--resume RUN --set KEY=VALUE"]),
        (["--resume", "nowhere"], ["nowhere is not a run folder: it does not exist"]),
        (["--resume", "--runs", "nowhere"], ["nowhere has no run", "--config configs"]),
    ],
)
@pytest.mark.devices(8)
def test_invalid_arguments_are_reported_without_a_traceback(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: list[str]
) -> None:
    out, err, code = stdout_and_code(capsys, "train", *words)
    assert code == 2
    assert err.startswith("error: ")
    for part in expected:
        assert part in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("pod", "--deviecs", "2", "--", "true"), "--devices"),
        (("train", "--confg=x"), "--config"),
    ],
)
def test_unknown_option_prints_the_usage_of_the_command(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], meant: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    err = capsys.readouterr().err
    assert left.value.code == 2
    assert err.startswith(f"usage: xlashard {words[0]} [")
    assert err.endswith(f"\nerror: unknown option {words[1]}; did you mean {meant}?\n")


def test_unknown_words_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, err, code = stdout_and_code(capsys, "compile", "a.toml", "b.toml", "--zzz")
    assert code == 2 and err.endswith("\nerror: unknown option --zzz\n")
    _, err, code = stdout_and_code(capsys, "compile", "a.toml", "b.toml")
    assert code == 2 and err.endswith("\nerror: too many arguments: b.toml\n")


def test_a_reader_that_leaves_ends_a_command_silently(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["completion", "bash"]) == 128 + signal.SIGPIPE
        closed.write("what Python flushes at exit")
    assert capfd.readouterr().err == ""


def test_a_terminal_without_a_character_gets_one_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(installation, "_checks", lambda: [Check("a", "note", "2 × ß", "c")])
    assert main(["doctor"]) == 0
    assert b"2 x \\xdf\n" in written.getvalue() and b"-> c\n" in written.getvalue()
    printed = len(written.getvalue())
    assert main(["doctor", "--json"]) == 0
    document = json.loads(written.getvalue()[printed:])
    assert document["checks"][0]["observed"] == "2 × ß"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_into_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out, _, code = stdout_and_code(capsys, command, "--help")
    assert code == 0 and f"usage: xlashard {command}" in out
    usage, _, below_usage = out.partition("\n\n")
    assert max(map(len, usage.splitlines())) <= 80
    prose = [line for line in below_usage.splitlines() if "xlashard completion" not in line]
    assert max(map(len, prose)) <= 60


@pytest.mark.needs_jax
def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package itself keeps its room, which is imported again here.
    monkeypatch.setattr(xs, "train", importlib.import_module("xlashard.train"))
    for name in [x for x in sys.modules if x.startswith("xlashard.train")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optax", None)
    _, err, code = stdout_and_code(capsys, "train", "--config", TINY)
    assert code == 1
    assert "pip install 'xlashard[train]'" in err


@pytest.mark.parametrize(
    ("package", "command"),
    [("jax", "pip install jax\n"), ("optax", "pip install 'xlashard[train]'\n")],
)
def test_missing_package_is_named_with_its_installation(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    command: str,
) -> None:
    def fail(name: str) -> NoReturn:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(importlib, "import_module", fail)
    _, err, code = stdout_and_code(capsys, "completion", "bash")
    assert code == 1
    assert err.startswith("error: `xlashard completion` needs ") and err.endswith(command)
    package = f"{package}.removed"
    with pytest.raises(ModuleNotFoundError, match=package):
        stdout_and_code(capsys, "completion", "bash")
