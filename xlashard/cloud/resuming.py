"""The command by which a job goes on where an earlier start of it has left off."""

import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Resumption:
    """How a job goes on.

    Attributes:
        command: That goes on.
        checkpoints: Patterns of paths of which one exists as soon as it can.
    """

    command: str
    checkpoints: str


def resumption_of(command: str) -> Resumption | None:
    """How a job of ``xlashard train`` goes on; None if the command is not just that.

    Example:
        >>> found = resumption_of("xlashard train --config configs/1b.toml --runs /mnt/runs")
        >>> found.checkpoints
        '/mnt/runs/1b/checkpoints/[0-9]* /mnt/runs/1b-*/checkpoints/[0-9]*'
        >>> found.command
        'xlashard train --runs /mnt/runs --resume "${last%/checkpoints/*}"'
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    where = _after_train(words)
    if where is None or any(word in _SHELL for word in words):
        return None
    kept, values = _without(words[where:], ("--config", "--name", "--runs", "--resume"))
    if "--config" not in values or "--resume" in values:
        return None
    runs = values.get("--runs", "runs")
    name = values.get("--name", PurePosixPath(values["--config"]).stem)
    folder = shlex.quote(f"{runs}/{name}")
    going_on = shlex.join([*words[:where], *kept, "--runs", runs])
    return Resumption(
        f'{going_on} --resume "${{last%/checkpoints/*}}"',
        f"{folder}/checkpoints/[0-9]* {folder}-*/checkpoints/[0-9]*",
    )


_SHELL = {"&&", "||", ";", "|", "&", "then", "do"}


def _after_train(words: list[str]) -> int | None:
    """Where the arguments of `xlashard train` begin; None if it is something else."""
    for number in range(1, len(words)):
        program = PurePosixPath(words[number - 1]).name
        if words[number] == "train" and program == "xlashard":
            return number + 1
    return None


def _without(words: list[str], names: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """The arguments without some options, and the values that those have."""
    kept: list[str] = []
    values: dict[str, str] = {}
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name not in names:
            kept.append(word)
        else:
            values[name] = value if equals else next(left, "")
    return kept, values


def start_or_resume(command: str, resumption: Resumption | None) -> str:
    """A shell command that goes on where there is a checkpoint, and else starts.

    Each worker decides by itself, and all the same: a checkpoint comes to be only when all of them
    have started.

    Args:
        command: That starts.
        resumption: How to go on; None if the command knows by itself.
    """
    if resumption is None:
        return command
    # By the time of the last change: a run that began anew has a folder of its own.
    return (
        f"last=$(ls -dt {resumption.checkpoints} 2>/dev/null | head -n 1)\n"
        f'if [ -n "$last" ]; then\n'
        f'  echo "going on from $last"\n'
        f"  {resumption.command}\n"
        f"else\n"
        f"  {command}\n"
        f"fi"
    )
