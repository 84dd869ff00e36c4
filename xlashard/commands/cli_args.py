"""Command line arguments of the subcommands."""

import argparse
import re
from collections.abc import Sequence


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard train`."""
    parser.set_defaults(parser=parser)
    parser.description = (
        "Trains a byte-level transformer with the settings of a TOML file, and leaves settings, "
        "measurements and a loss curve in RUNS/NAME. Ctrl-C or SIGTERM stops it and leaves a "
        "checkpoint, from which --resume continues."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the settings file, such as configs/tiny.toml"
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        nargs="?",
        const="",
        help="go on with a run from its last checkpoint, in its folder and with its settings; "
        "without RUN: with the last one in RUNS",
    )
    parser.add_argument(
        "--auto-resume",
        action="store_true",
        help="resume the newest run of that name in RUNS that has a checkpoint, or start it. For "
        "jobs that are restarted after preemption",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        nargs="+",
        help="text files or folders of them, instead of the prose that ships with Python",
    )
    add_settings(parser)
    parser.add_argument("--name", help="folder of the results below RUNS; default: the file's name")
    parser.add_argument("--steps", type=int, metavar="N", help="the same as --set training.steps=N")
    parser.add_argument(
        "--runs", metavar="FOLDER", default="runs", help="where the results go (default: runs)"
    )
    parser.add_argument(
        "--keys", action="store_true", help="print every key with its type and default, and end"
    )


def add_pod(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard pod`."""
    parser.set_defaults(parser=parser)
    parser.usage = (
        "xlashard pod [-n N] [-d D] [--timeout S] [--grace S] [--only I,J] -- COMMAND ..."
    )
    parser.description = (
        "Runs a command in N processes of this machine that JAX can join to a pod, each with D "
        "emulated CPU devices: jax.distributed.initialize() and xlashard.multihost.initialize() "
        "find their place by themselves. Every line of output has the number of its process. When "
        "one fails the others are ended, and when this command ends in any way, so do all."
    )
    parser.add_argument(
        *("-n", "--processes"),
        type=count,
        default=2,
        metavar="N",
        help="how many processes (default: 2)",
    )
    parser.add_argument(
        *("-d", "--devices"),
        type=count,
        default=1,
        metavar="D",
        help="how many emulated devices each has (default: 1)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        help="seconds after which all show the stacks of their threads and are ended",
    )
    parser.add_argument(
        "--grace",
        type=seconds,
        default=5.0,
        metavar="S",
        help="seconds that the others have when one has failed (default: 5)",
    )
    parser.add_argument(
        "--only",
        type=_numbers,
        metavar="I,J",
        help="show the output of these processes alone; of another that fails, its last lines",
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as python script.py"
    )


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if all(word.isascii() and word.isdecimal() for word in words):
        return sorted({int(word) for word in words})
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of processes such as 0,2")


def add_preflight(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``xlashard preflight``."""
    parser.set_defaults(parser=parser)
    parser.description = (
        "Reports the memory, step time, collectives and cost of a program on TPU chips, on a "
        "machine without one."
    )
    parser.epilog = (
        "Exit code: 0 if each program fits and meets its budget, 1 if not, 2 for wrong use."
    )
    parser.add_argument(
        "targets",
        metavar="TARGET",
        nargs="*",
        help="settings of a training run (CONFIG.toml); a function that gives (function, "
        "arguments) (package.module:function); or a stored report (REPORT.json)",
    )
    _add_topology(parser, "NAME[,NAME]", "; several are compared")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N[,AXIS=N]",
        default="",
        help="the mesh axes and their sizes, one of which may be -1; by default "
        "those of the settings. To try every mesh: auto, or data=auto,tensor=..8",
    )
    parser.add_argument(
        "--price",
        metavar="AMOUNT",
        help="cost per chip-hour: 4.2 or '4.20 USD'; where meshes of several "
        "generations are tried, v5e=1.2,v5p=4.2",
    )
    _add_program(parser)
    _add_results(parser)
    add_script(parser)
    _add_sweep(parser.add_argument_group("where every mesh is tried"))


def _add_topology(parser: argparse.ArgumentParser, metavar: str, besides: str = "") -> None:
    parser.add_argument(
        *("-t", "--topology"),
        metavar=metavar,
        default="",
        help=f"the chips: v5p-128, v5litepod-16, v6e:8x8{besides}; by default those that the "
        "settings name",
    )


def _add_program(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that change a program or its compilation."""
    parser.add_argument("--slices", type=int, metavar="N", help="number of slices (default: 1)")
    add_settings(parser)
    _add_pairs(
        parser,
        "--option",
        "NAME=VALUE",
        "options of the compiler, such as xla_tpu_scoped_vmem_limit_kib=65536",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``, for commands with a settings file."""
    _add_pairs(
        parser,
        "--set",
        "KEY=VALUE",
        "settings that override the file, such as model.layers=4",
    )


def _add_pairs(parser: argparse.ArgumentParser, word: str, metavar: str, help_text: str) -> None:
    """Add a repeatable argument with several pairs."""
    parser.add_argument(
        word, metavar=metavar, nargs="+", action="extend", default=[], help=help_text
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the reports."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the report as JSON; a folder for several; - for standard output",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page that shows all reports")
    parser.add_argument("--all", action="store_true", help="show every row, not only the largest")
    _add_pairs(
        parser,
        "--budget",
        "KEY=VALUE",
        "limits to check, such as hbm=90%% all_gather_bytes=2GB time=2s mfu=40%%",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="show what changed from the first report to the second",
    )
    _add_markdown(parser)
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of a report, and exit"
    )


def _add_markdown(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--markdown",
        metavar="FILE",
        help="write the changes that --compare shows as Markdown, for a comment on a pull request; "
        "- for standard output",
    )


def _add_sweep(group: argparse._ArgumentGroup) -> None:
    """Add the arguments of sweeps."""
    group.add_argument(
        "--folder", metavar="FOLDER", help="folder of the results (default: sweeps/NAME)"
    )
    group.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="number of worker processes; by default as many as CPUs and memory allow",
    )
    group.add_argument(
        "--timeout", type=seconds, default=0.0, metavar="S", help="timeout per mesh in seconds"
    )
    group.add_argument("--again", action="store_true", help="recompile cached results")


def add_compile(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``xlashard compile``."""
    parser.set_defaults(parser=parser)
    parser.description = (
        "Compiles a program for TPU chips, on a machine without one, into a file that "
        "Compiled.deserialize loads where the chips are."
    )
    parser.epilog = (
        "Exit code: 0 if the file is there, 1 if the program does not fit, 2 for wrong use."
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="settings of a training run (CONFIG.toml), or a function that gives (function, "
        "arguments) (package.module:function)",
    )
    parser.add_argument(
        *("-o", "--output"), metavar="FILE", help="the file (default: NAME.xlashard)"
    )
    _add_topology(parser, "NAME")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N[,AXIS=N]",
        default="",
        help="the mesh axes and their sizes; by default those of the settings",
    )
    _add_program(parser)


def count(text: str) -> int:
    """Parse a positive integer.

    Args:
        text: Command line text.
    """
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")


def seconds(text: str) -> float:
    """Parse a positive number of seconds.

    Args:
        text: Command line text.
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if 0 < found < float("inf"):
        return found
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def add_legacy(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard legacy`."""
    parser.set_defaults(parser=parser)
    parser.usage = "xlashard legacy --migrate FILE ... [--write]"
    parser.description = (
        "Rewrites programs of 2022 and 2023 for today's JAX: imports, pjit, meshes, "
        "GlobalDeviceArray and flags, with their formatting kept. The changes are shown as a diff. "
        "A line that needs a human gets a comment above it that begins with `# xlashard:`. Exit "
        "codes: 0 done, 1 a file could not be read, parsed or written, 2 wrong use."
    )
    parser.epilog = "To run such a program as it is: python -m xlashard.legacy script.py"
    parser.add_argument(
        "--migrate", nargs="+", required=True, metavar="FILE", help="the Python files to rewrite"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the files after the diff; without this option they stay as they are",
    )


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard doctor`."""
    parser.set_defaults(parser=parser)
    parser.description = (
        "Checks whether the versions of Python, JAX, jaxlib, libtpu and plugins fit together, "
        "which extras are installed, the variables of the environment, the devices, the "
        "compilation cache, and compiles a program here and one for TPUs. Exit codes: 0 all is "
        "well, 1 a check failed."
    )
    parser.epilog = "The workers of a Cloud TPU: tpu_scripts/doctor.py of the repository."
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard completion`."""
    parser.set_defaults(parser=parser)
    parser.usage = "xlashard completion {bash,zsh,fish}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Prints a script by which a shell completes commands,\n"
        "options, topologies and files. To install it:\n"
        "  bash  echo 'source <(xlashard completion bash)' >> ~/.bashrc\n"
        "  zsh   echo 'source <(xlashard completion zsh)' >> ~/.zshrc\n"
        "  fish  xlashard completion fish > ~/.config/fish/completions/xlashard.fish"
    )
    parser.add_argument(
        "shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish"
    )
    # The script calls `xlashard completion SHELL WORD ...` to complete the last word.
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


_WITH_SCRIPT = ("explain", "preflight", "run")


def split_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line at `--`, after which the words of a script follow.

    Args:
        words: The command line without the program's name.
    """
    at = len(words)
    if words and words[0] in _WITH_SCRIPT and "--" in words:
        at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``xlashard run``."""
    parser.set_defaults(parser=parser)
    parser.usage = "xlashard run -- python train.py ARGS ..."
    parser.description = (
        "Runs a script as it is, with xlashard imported beside JAX, so that its settings apply: "
        "XLASHARD_CHECK_PROGRAMS=1 compares programs of jax.jit between processes before their "
        "first run, XLASHARD_EXPLAIN_RECOMPILES=1 logs why a function is compiled again."
    )


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``xlashard explain``."""
    parser.set_defaults(parser=parser)
    parser.usage = (
        "xlashard explain [OPTIONS] TARGET\n"
        "       xlashard explain [OPTIONS] -- python train.py ARGS ..."
    )
    parser.description = (
        "Reports what programs send between devices, hold and compute: of a function, or of each "
        "program that a script compiles. The script runs as it is."
    )
    parser.epilog = (
        "Exit code: 0; 1 if the script failed, a program can't be explained, misses its budget, or "
        "became worse than in --compare; 2 for wrong use."
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        help="a function that returns (function, arguments), or a jitted function without "
        "arguments (package.module:function); or a stored report (REPORT.json)",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N[,AXIS=N]",
        default="",
        help="the mesh that the function of TARGET takes, over the devices of this process",
    )
    add_script(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - for standard output"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page that shows all reports")
    parser.add_argument("--all", action="store_true", help="show every row, not only the largest")
    _add_pairs(
        parser,
        "--budget",
        "KEY=VALUE",
        "limits for each program, such as memory=80GiB all_gather_bytes=2GB",
    )
    parser.add_argument(
        "--compare",
        metavar="OLD.json",
        help="show what changed since a stored report; programs are matched by name",
    )
    _add_markdown(parser)


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the programs of a script after ``--``."""
    group = parser.add_argument_group("where a script follows --")
    group.add_argument(
        "--programs",
        metavar="NAME",
        action="append",
        default=[],
        help="report programs with this name, a glob ('train_*') or a regular expression "
        "('/train|eval/'); repeatable. By default all but operations outside of jit",
    )
    group.add_argument(
        "--stop-after",
        metavar="N",
        type=limit,
        help="stop the script once one of these programs has been called N times, or after a time "
        "such as 90s; Ctrl-C stops it too. By default explain runs it to its end, and preflight "
        "stops it after 20 calls",
    )
    group.add_argument(
        "--min-bytes",
        metavar="SIZE",
        type=size,
        help="report programs of at least SIZE bytes of arguments and results, such as 1MB, "
        "operations outside of jit included",
    )


def limit(text: str) -> tuple[int | None, float | None]:
    """Parse a number of calls (`3`) or of seconds (`90s`): one of both is None.

    Args:
        text: Command line text.
    """
    try:
        if text.endswith("s"):
            return None, seconds(text.removesuffix("s"))
        return count(text), None
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of calls such as 3 nor a time such as 90s"
        ) from None


def size(text: str) -> int:
    """Parse a number of bytes: `0`, `1MB`, `1.5GiB`.

    Args:
        text: Command line text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B?)", text.strip())
    if match is None or (match[3] and not match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 1MB")
    power = "kMGT".index(match[2].replace("K", "k")) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
