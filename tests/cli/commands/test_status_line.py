"""Status lines of long-running commands, and their end by signals."""

import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.fork_server import python_command
from tests.waiting import wait_for
from xlashard.cli import main as cli
from xlashard.cli.commands import status_line as status_module
from xlashard.cli.commands.status_line import status_line
from xlashard.support import background, consoles
from xlashard.support.background import SIGNALS, StopSignal
from xlashard.workers.dump_folder import remove_own_folders, temporary_dump_folder

ROOT = Path(__file__).parents[3]


def test_status_in_a_log_is_printed_as_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(consoles, "_LINE_INTERVAL", 0.01)
    shown = ""

    def has_shown(lines: int) -> bool:
        nonlocal shown
        shown += capfd.readouterr().err
        return shown.count("\n") >= lines

    with status_line("compiling a\x1b[31mb for v5p-128"):
        wait_for(lambda: has_shown(2), "two lines")
    first, *_ = shown.splitlines()
    assert re.fullmatch(r"compiling a\\x1b\[31mb for v5p-128: \d+ s", first)
    assert not [t for t in background._STOPS if t.name == "progress"]


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_raises_an_exception_in_the_main_thread(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    cleaned = []

    def run(_: object) -> int:
        try:
            with status_line("compiling f"):
                signal.raise_signal(number)
                threading.Event().wait(60)
        finally:
            cleaned.append(True)
        return 0

    monkeypatch.setattr(status_module, "run", run, raising=False)
    command = cli._COMMANDS["compile"]._replace(module="xlashard.cli.commands.status_line")
    monkeypatch.setitem(cli._COMMANDS, "compile", command)
    assert cli.main(["compile", "f"]) == 128 + number
    name = {signal.SIGINT: "Ctrl-C"}.get(number, number.name)
    assert capsys.readouterr().err == f"stopped by {name} after 0 s: compiling f\n"
    assert cleaned
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_except_exception_does_not_catch_the_stop_signal() -> None:
    with pytest.raises(StopSignal) as raised, status_line("f"):
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception:
            pytest.fail("caught")
    assert raised.value.exit_code == 143


def test_remove_own_folders_removes_folders_in_use() -> None:
    with temporary_dump_folder() as folder:
        (folder / "module.txt").touch()
        remove_own_folders()
        assert not folder.exists()


@pytest.mark.slow
def test_sigterm_ends_a_compilation_and_removes_its_dump_folder(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment = kept | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    program = "tests.cli.commands.programs:slow_to_compile"
    words = ("-m", "xlashard", "preflight", "-t", "v5e-4", "--mesh", "data=4", program)
    with subprocess.Popen(
        [*python_command(environment), *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # libtpu writes the module before it compiles it for many seconds.
        wait_for(lambda: list(tmp_path.glob("xlashard-dump-*/*module*")), "compilation")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert out == ""
    last = err.splitlines()[-1]
    assert re.fullmatch(rf"stopped by SIGTERM after \d+ s: compiling {program} for v5e:2x2", last)
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())
