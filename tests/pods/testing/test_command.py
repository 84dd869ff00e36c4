"""`xlashard pod`: the output of several processes."""

import io
import sys

import pytest

from tests.pods.testing.helpers import python, start
from xlashard.cli.main import main
from xlashard.pods.testing.launcher import OutputChunk
from xlashard.pods.testing.pod_command import PrefixPrinter, as_shown
from xlashard.pods.testing.supervision import last_lines, without_noise

WHO = "import os; me = os.environ['XLASHARD_POD_PROCESS_ID']; "


def pod(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int | str | None, str, str]:
    """Return exit code, standard output and standard error of a command line."""
    try:
        code: int | str | None = main(["pod", *words])
    except SystemExit as end:
        code = end.code
    out, err = capfd.readouterr()
    return code, out, err


def test_output_lines_are_prefixed_with_the_process_index(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = f"{WHO} import sys; print('out', me); print('err', me, file=sys.stderr)"
    code, out, err = pod(capfd, "-n", "3", "--", *python(source))
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] out 0", "[1] out 1", "[2] out 2"]
    assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1", "[2] err 2"]


@pytest.mark.slow
def test_arguments_after_the_command_are_passed_to_the_command(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = "import sys; print(sys.argv[1:])"
    for dashes in ([], ["--"]):
        code, out, _ = pod(capfd, "-n", "1", *dashes, *python(source), "-n", "--grace", "--", "-d")
        assert (code, out) == (0, "[0] ['-n', '--grace', '--', '-d']\n")


def test_device_count_is_passed_to_the_processes(capfd: pytest.CaptureFixture[str]) -> None:
    source = "import os; print(os.environ['XLA_FLAGS'])"
    _, out, _ = pod(capfd, "-n", "1", "-d", "5", *python(source))
    assert "--xla_force_host_platform_device_count=5" in out


@pytest.mark.slow
def test_first_failure_determines_the_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    source = f"{WHO} import sys, time; me == '1' and sys.exit(7); time.sleep(1000)"
    code, _, err = pod(capfd, "--grace", "0.1", "--", *python(source))
    assert code == 7
    assert err.splitlines()[-1] == (
        "xlashard pod: process 1 failed first: exit code 7; process 0 still ran 0.1 s later and "
        "was ended"
    )


@pytest.mark.slow
def test_timeout_shows_the_stacks_of_all_processes(capfd: pytest.CaptureFixture[str]) -> None:
    source = "def stuck(): __import__('time').sleep(1000)\nstuck()"
    code, _, err = pod(capfd, "--timeout", "1", "--", *python(source))
    assert code == 124
    assert err.count("in stuck") == 2
    assert err.endswith("xlashard pod: processes 0, 1 did not end within 1 s\n")


@pytest.mark.parametrize(
    ("words", "code", "texts"),
    [
        ([], 2, ["no command", "xlashard pod -n 4 -d 2 -- python script.py"]),
        (["--"], 2, ["no command"]),
        (["-n", "0", "true"], 2, ["-n/--processes: '0' is not a whole number of 1 or more"]),
        (["-d", "two", "true"], 2, ["-d/--devices: 'two'"]),
        (["--timeout", "0", "true"], 2, ["'0' is not a number of seconds above 0"]),
        (["--timeout", "nan", "true"], 2, ["'nan'"]),
        (["nonesuch"], 127, ["error: program 'nonesuch' was not found on the PATH"]),
        (["/"], 126, ["error: '/' cannot be started: Permission denied"]),
    ],
)
def test_invalid_arguments_are_refused(
    capfd: pytest.CaptureFixture[str], words: list[str], code: int, texts: list[str]
) -> None:
    exit_code, out, err = pod(capfd, *words)
    assert (exit_code, out) == (code, "")
    for text in texts:
        assert text in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_closed_stdout_ends_the_pod() -> None:
    command = [sys.executable, "-m", "xlashard", "pod", "--", *python("while True: print(1)")]
    launcher = start(command)
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(60) == 141


def shown(*pieces: tuple[int, bytes], processes: int = 2, **streams: io.StringIO) -> str:
    """Return the output of a printer for some pieces."""
    stream = streams.get("stream", io.StringIO())
    printer = PrefixPrinter(stream, stream, processes)
    for process, text in pieces:
        printer.show(OutputChunk(process, "stdout", text))
    printer.finish()
    return stream.getvalue()


def test_lines_of_processes_are_not_interleaved() -> None:
    pieces = [(0, b"he"), (1, b"good"), (0, b"llo\nagain\nan"), (1, b"bye\n"), (0, b"d"), (0, b"")]
    assert shown(*pieces) == "[0] hello\n[0] again\n[1] goodbye\n[0] and\n"


def test_unterminated_line_is_flushed_at_the_end() -> None:
    assert shown((1, b"no end")) == "[1] no end\n"


def test_very_long_line_is_flushed_early() -> None:
    stream = io.StringIO()
    PrefixPrinter(stream, stream, 1).show(OutputChunk(0, "stdout", b"x" * 70_000))
    assert len(stream.getvalue()) > 70_000


def test_process_numbers_are_aligned() -> None:
    assert shown((3, b"a\n"), (11, b"b\n"), processes=12) == "[ 3] a\n[11] b\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain", "plain"),
        (b"of windows\r", "of windows"),
        (b"10 %\r50 %\r100 %", "100 %"),
        (b"\xff", "�"),
        ("µ".encode(), "µ"),
        (b"", ""),
    ],
)
def test_carriage_return_overwrites_the_line(line: bytes, text: str) -> None:
    assert as_shown(line) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_appear_only_in_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    pieces = ((0, b"a\n"), (1, b"b\n"))
    coloured = shown(*pieces, stream=Terminal())
    assert coloured == "\x1b[36m[0]\x1b[0m a\n\x1b[32m[1]\x1b[0m b\n"
    assert shown(*pieces) == "[0] a\n[1] b\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(*pieces, stream=Terminal()) == "[0] a\n[1] b\n"


def test_known_noise_lines_are_filtered() -> None:
    gloo = (
        b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected ranks is : 1\n"
    )
    assert without_noise(b"a\n" + gloo + b"b\n") == "a\nb\n"
    assert without_noise(b"what [Gloo] Rank means\n") == "what [Gloo] Rank means\n"
    assert shown((0, gloo), (0, b"b\n")) == "[0] b\n"


def test_last_lines_counts_the_omitted_lines() -> None:
    assert last_lines("a\nb\nc\n\n", 2) == "[1 line before]\nb\nc"
    assert last_lines("a\n", 2) == "a"
    assert last_lines("", 2) == ""


def test_signal_handlers_are_restored(capfd: pytest.CaptureFixture[str]) -> None:
    import signal

    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    pod(capfd, "true")
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_help_text(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = pod(capfd, "--help")
    assert code == 0
    for word in ("-n", "-d", "--timeout", "--grace", "jax.distributed.initialize()"):
        assert word in out
