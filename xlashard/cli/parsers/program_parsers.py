"""Arguments of the commands that take a program: `preflight`, `compile`, `explain`, `run`."""

import argparse
from collections.abc import Sequence

from xlashard.cli.parsers.tool_parsers import add_pairs, add_settings, count, seconds, size


def add_preflight(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``xlashard preflight``."""
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
    _add_layout(parser)
    parser.add_argument(
        "--price",
        metavar="AMOUNT",
        help="cost per chip-hour: 4.2 or '4.20 USD'; where meshes of several "
        "generations are tried, v5e=1.2,v5p=4.2",
    )
    _add_program(parser)
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="stop the compiler before it generates code: seconds instead of minutes. The report "
        "is the same, but its memory is without the code",
    )
    add_pairs(
        parser,
        "--kernel-cost",
        "NAME=TIME",
        "time of a kernel whose cost the report does not know, such as splash_mha_fwd=1.2ms; or a "
        "TOML file with times by name",
    )
    _add_results(
        parser,
        "write the report as JSON, several to one file; - for standard output",
        "limits to check, such as hbm=90%% all_gather_bytes=2GB time=2s mfu=40%%",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="show what changed from the first report to the second",
    )
    _add_measurement(parser)
    _add_schema(parser)
    add_script(parser).add_argument(
        "--run",
        metavar="SIZE",
        type=size,
        help="run a program on the CPU once the script reads a value of its results, if its "
        "arguments and results have at most SIZE bytes on all devices; zeros stand in for those "
        "of larger ones (default: 256MiB, for programs of one device 2GiB)",
    )
    _add_sweep(parser.add_argument_group("where every mesh is tried"))


def add_compile(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``xlashard compile``."""
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


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``xlashard explain``."""
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
    _add_results(
        parser,
        "write the report as JSON; - for standard output",
        "limits for each program, such as memory=80GiB all_gather_bytes=2GB",
    )
    parser.add_argument(
        "--compare",
        metavar="OLD.json",
        help="show what changed since a stored report; programs are matched by name",
    )
    _add_schema(parser, "of a script's programs")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``xlashard run``."""
    parser.usage = "xlashard run -- python train.py ARGS ..."
    parser.description = (
        "Runs a script as it is, with xlashard imported beside JAX, so that its settings apply: "
        "XLASHARD_CHECK_PROGRAMS=1 compares programs of jax.jit between processes before their "
        "first run, XLASHARD_EXPLAIN_RECOMPILES=1 logs why a function is compiled again. Functions "
        "of jax.jit are watched for xlashard.explain_recompile."
    )


def add_script(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments for the programs of a script after ``--``, and return their group."""
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
        help="stop the script once one of these functions has been called N times, or after a time "
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
    return group


_WITH_SCRIPT = ("explain", "preflight", "run", "legacy")


def find_script(command: str, words: Sequence[str]) -> str:
    """Return the advice for a script that stands before `--`; empty if none does.

    Args:
        command: Name of the command.
        words: Words that no argument of the command takes.

    Example:
        >>> find_script("run", ["python", "train.py", "3"])
        'write xlashard run -- python train.py 3'
    """
    at = [n for n, word in enumerate(words) if word.endswith(".py")]
    if command not in _WITH_SCRIPT or not at:
        return ""
    return f"write xlashard {command} -- python {' '.join(words[at[0] :])}"


def split_script(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line at `--`, after which the words of a script follow.

    Args:
        words: The command line without the program's name.
    """
    at = len(words)
    if words and words[0] in _WITH_SCRIPT and "--" in words:
        at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def _add_topology(parser: argparse.ArgumentParser, metavar: str, besides: str = "") -> None:
    parser.add_argument(
        *("-t", "--topology"),
        metavar=metavar,
        default="",
        help=f"the chips: v5p-128, v6e:8x8, h100-32, p5.48xlarge{besides}; by default those "
        "that the settings name",
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose a mesh and shardings, and what goes with them."""
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N[,AXIS=N]",
        default="",
        help="the mesh axes and their sizes, one of which may be -1; by default "
        "those of the settings. To try every mesh: auto, or data=auto,tensor=..8",
    )
    parser.add_argument(
        "--shardings",
        choices=["auto"],
        help="choose the layout that the program leaves open: specs of arguments and results, and "
        "constraints inside; of a settings file all. With --mesh auto, or data=auto,model=..8, the "
        "mesh too",
    )
    parser.add_argument(
        "--batch",
        metavar="auto|N[,N]",
        default="",
        help="with --shardings auto, of a settings file: choose the batch, too, by tokens per "
        "second",
    )
    parser.add_argument(
        "--remat",
        metavar="auto|NAME[,NAME]",
        default="",
        help="with --shardings auto, of a settings file: choose the remat policy, too: custom (the "
        "settings' own), none, full, minimal, ...",
    )


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the schedule of a step, and for a measured one."""
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write the schedule of the step as a trace for ui.perfetto.dev, such as "
        "step.json.gz; - for standard output",
    )
    parser.add_argument(
        "--measured",
        metavar="PROFILE",
        help="show the prediction beside a profile of a real run: *.xplane.pb of jax.profiler, or "
        "its folder",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="write the chip's rates that --measured shows, for --rates",
    )
    parser.add_argument(
        "--rates",
        metavar="FILE[,FILE]",
        help="predict with the chip's rates that --calibrate wrote; a file for each kind of chips",
    )


def _add_program(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that change a program or its compilation."""
    parser.add_argument("--slices", type=int, metavar="N", help="number of slices (default: 1)")
    add_settings(parser)
    add_pairs(
        parser,
        "--option",
        "NAME=VALUE",
        "options of the compiler, such as xla_tpu_scoped_vmem_limit_kib=65536",
    )


def _add_results(parser: argparse.ArgumentParser, json: str, budget: str) -> None:
    """Add the arguments for the reports, with the help of ``--json`` and ``--budget``."""
    parser.add_argument("--json", metavar="FILE", help=json)
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write a page that shows all reports; - for standard output",
    )
    parser.add_argument(
        "--values",
        metavar="PATTERN",
        default="",
        help="show the sharding of each value inside whose name (checkpoint_name, name scope, "
        "operation, function or line) matches a regular expression, such as 'attention|logits'",
    )
    parser.add_argument("--all", action="store_true", help="show every row, not only the largest")
    parser.add_argument(
        "--skip",
        metavar="PATTERN",
        action="append",
        default=[],
        help="files whose lines are not shown as yours, a path or a glob such as 'layers/*.py', "
        "but those of their callers; repeatable",
    )
    add_pairs(parser, "--budget", "KEY=VALUE", budget)
    parser.add_argument(
        "--markdown",
        metavar="FILE",
        help="write the changes that --compare shows as Markdown, for a comment on a pull request; "
        "- for standard output",
    )


def _add_schema(parser: argparse.ArgumentParser, of: str = "") -> None:
    report = f"the report {of}" if of else "a report"
    parser.add_argument(
        "--schema", action="store_true", help=f"print the JSON Schema of {report}, and exit"
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
