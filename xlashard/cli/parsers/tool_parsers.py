"""Command line arguments of the subcommands."""

import argparse

from xlashard.support.formatting import parse_amount


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard train`."""
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


def add_reshard_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard reshard-checkpoint`."""
    parser.usage = (
        "xlashard reshard-checkpoint SRC DST --mesh AXIS=SIZE,...\n"
        "                    --rules PATTERN=SPEC ... [--memory-limit SIZE] [--json]\n"
        "       xlashard reshard-checkpoint SRC DST --format safetensors\n"
        "                    [--file-size SIZE] [--memory-limit SIZE] [--json]"
    )
    parser.description = (
        "Copies a checkpoint of orbax or files of safetensors, array by array and chunk by chunk, "
        "on the CPU. In a checkpoint of orbax each shard of the mesh is a chunk or several, which "
        "a process reads alone; the tree stays, and files of safetensors become a dict. The copy "
        "appears under its name when it is whole. Exit codes: 0 done, 1 failed, 2 wrong use."
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a folder of orbax (the one with _METADATA), "
        "a file .safetensors, or a folder or index of several",
    )
    parser.add_argument(
        "destination",
        metavar="DST",
        help="the copy, which does not exist yet: a folder, or a file *.safetensors",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE",
        help="the mesh axes and their sizes; no devices are needed: data=16,model=4",
    )
    add_pairs(
        parser,
        "--rules",
        "PATTERN=SPEC",
        "spec of the arrays in whose name a regular "
        "expression is found, the first that matches: \"kernel$=P('data', 'model')\". Others are "
        "whole",
    )
    parser.add_argument(
        "--format",
        choices=("orbax", "safetensors"),
        metavar="FORMAT",
        help="format of DST: orbax or safetensors; default: by its name, else orbax",
    )
    parser.add_argument(
        "--memory-limit",
        type=positive_size,
        default=2**30,
        metavar="SIZE",
        help="memory that copying may take above the start (default: 1GiB)",
    )
    parser.add_argument(
        "--file-size",
        type=positive_size,
        default=5 * 10**9,
        metavar="SIZE",
        help="size of the files of safetensors in a folder (default: 5GB)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_pod(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard pod`."""
    parser.usage = (
        "xlashard pod [-n N] [-d D] [--timeout S] [--grace S]\n                    -- COMMAND ..."
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
        "program", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as python script.py"
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``, for commands with a settings file."""
    add_pairs(
        parser,
        "--set",
        "KEY=VALUE",
        "settings that override the file, such as model.layers=4",
    )


def add_pairs(parser: argparse.ArgumentParser, word: str, metavar: str, help_text: str) -> None:
    """Add a repeatable argument with several pairs.

    Args:
        parser: The parser.
        word: The argument, such as `--set`.
        metavar: Form of a pair.
        help_text: Its help.
    """
    parser.add_argument(
        word, metavar=metavar, nargs="+", action="extend", default=[], help=help_text
    )


def count(text: str) -> int:
    """Parse a positive integer.

    Args:
        text: Command line text.
    """
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")


def size(text: str) -> int:
    """Parse a number of bytes: `0`, `1MB`, `1.5GiB`.

    Args:
        text: Command line text.
    """
    amount = parse_amount(text, "bytes", plain=True)
    if amount is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 1MB")
    return int(amount)


def positive_size(text: str) -> int:
    """Parse a number of bytes above 0, with its unit.

    Args:
        text: Command line text.
    """
    if amount := parse_amount(text, "bytes", plain=False):
        return int(amount)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes above 0 such as 1GiB")


def seconds(text: str) -> float:
    """Parse a positive number of seconds.

    Args:
        text: Command line text.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0 < value < float("inf"):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def add_legacy(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard legacy`."""
    parser.set_defaults(flag_prefixes=("--jax_", "--nojax_"))
    parser.usage = (
        "xlashard legacy [--report[=FILE]] [--libraries] [--jax_FLAG=VALUE ...]\n"
        "                       -- python old_train.py ARGS ...\n"
        "       xlashard legacy --migrate FILE ... [--write]\n"
        "       xlashard legacy --migrate [FILE ...] --check\n"
        "                       -- python old_train.py ARGS ..."
    )
    parser.description = (
        "Runs unchanged programs of 2022 and 2023 on today's JAX, which gets the removed names "
        "back; or rewrites them for today's JAX: imports, pjit, meshes, GlobalDeviceArray and "
        "flags, with their formatting kept. A line that needs a human gets a comment above it that "
        "begins with `# xlashard:`."
    )
    parser.epilog = (
        "python -m xlashard.legacy old_train.py runs a program, too. Exit codes: that of the "
        "program; with --migrate 0, or 1 if a file could not be read, parsed or written; with "
        "--check 0 if both runs are equal, else 1; 2 for wrong use."
    )
    run = parser.add_argument_group(
        "to run a program, which follows --",
        "--jax_FLAG=VALUE and --nojax_FLAG set a flag of JAX, or of 2022 and 2023, before the "
        "program starts, such as --jax_array=0 --jax_parallel_functions_output_gda=1",
    )
    run.add_argument(
        "--report",
        nargs="?",
        const="",
        metavar="FILE",
        help="at exit, list the removed names that it used, their lines, and today's code; in a "
        "file as JSON",
    )
    run.add_argument(
        "--libraries",
        action="store_true",
        help="give back names that Python, NumPy, optax, flax and others took away since, such as "
        "np.object and cached_property; names that they have stay theirs",
    )
    migrate = parser.add_argument_group("to rewrite programs")
    migrate.add_argument("--migrate", nargs="*", metavar="FILE", help="show the changes as a diff")
    migrate.add_argument(
        "--write",
        action="store_true",
        help="write the files after the diff; without this option they stay as they are",
    )
    migrate.add_argument(
        "--check",
        action="store_true",
        help="run the old program and its migrated form, each in a copy of the folder, and compare "
        "what they print and compute; without FILE all files that the program runs are migrated",
    )


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard doctor`."""
    parser.description = (
        "Checks whether the versions of Python, JAX, jaxlib, libtpu and plugins fit together, "
        "which extras are installed, the variables of the environment, on a TPU host its chips, "
        "the processes that hold them and its limits, the devices, the compilation cache, and "
        "compiles a program here and one for TPUs. Exit codes: 0 all is well, 1 a check failed."
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the checks as JSON")
    output.add_argument(
        "--all-hosts",
        action="store_true",
        help="started on all hosts as their job is (TPU VMs, GKE, Slurm, xlashard pod): compare "
        "versions, code, variables and chips, and name the hosts that are missing",
    )


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard hosts`."""
    parser.description = (
        "Shows the processes of each job of yours that runs on this machine, on all of its hosts: "
        "step, memory, last collective of hosts, line, and who has other code, Python, JAX, jaxlib "
        "or libtpu. It asks a process of the job on this machine, which asks the others through "
        "JAX's coordination service; nothing else listens on a network. Exit codes: 0 all answered "
        "and have the same code, 1 one did not or has other code, or there is no job."
    )
    parser.add_argument(
        "--pid", type=count, metavar="PID", help="only the job of this process of the machine"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--stacks",
        action="store_true",
        help="print where each process is in place of the table, with the stacks of all main "
        "threads, those that the others wait for first",
    )
    output.add_argument("--json", action="store_true", help="print one JSON object for each job")


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard completion`."""
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
