"""``xlashard completion SHELL``: completion of the command line in bash, zsh and fish.

The scripts are short: they call `xlashard completion SHELL WORD ...`, which prints the candidates
for the last word, so that new options need no new script. Without candidates a shell completes
names of files.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from xlashard.errors import counted
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard.predict.targets.gpu import gpu_names
    from xlashard.predict.targets.tpu import generations, topology_names
else:
    # They read the tables of chips, which other words than topologies do without.
    gpu_names = deferred("xlashard.predict.targets.gpu.gpu_names")
    generations = deferred("xlashard.predict.targets.tpu.generations")
    topology_names = deferred("xlashard.predict.targets.tpu.topology_names")

_SCRIPTS = {
    "bash": r"""
_xlashard() {
    local IFS=$'\n'
    COMPREPLY=($(xlashard completion bash "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _xlashard xlashard
""",
    "zsh": r"""
#compdef xlashard
_xlashard() {
    local -a candidates
    candidates=("${(@f)$(xlashard completion zsh "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$candidates" ]]; then
        _describe xlashard candidates
    else
        _files
    fi
}
compdef _xlashard xlashard
""",
    "fish": r"""
function __xlashard_candidates
    set -l words (commandline -opc)
    set -e words[1]
    set -l candidates (xlashard completion fish $words (commandline -ct) 2>/dev/null)
    if test (count $candidates) -gt 0
        printf '%s\n' $candidates
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c xlashard -f -a '(__xlashard_candidates)'
""",
}
# Slices with more chips are completed by hand.
_MOST_CHIPS = 1024


def run(arguments: argparse.Namespace) -> int:
    """Print the script of a shell, or candidates for the last of some words.

    Args:
        arguments: Parsed arguments.

    Returns:
        The exit code.
    """
    if not arguments.words:
        print(_SCRIPTS[arguments.shell].lstrip("\n"), end="")
        return 0
    for word, note in candidates(arguments.main_parser, arguments.words):
        if arguments.shell == "zsh":
            word = word.replace(":", r"\:")
        separator = {"bash": "", "zsh": ":", "fish": "\t"}[arguments.shell]
        print(f"{word}{separator}{note}" if separator and note else word)
    return 0


_AUTOMATIC = {
    "mesh": ("auto",),
    "batch": ("auto",),
    "remat": ("auto", "custom", "none", "full", "minimal", "minimal_with_context"),
}
"""Words for options whose value a search may choose."""


def candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the candidates for the last word, each with a note.

    Args:
        parser: The parser of the whole command line.
        words: The words of the command line up to the cursor, without `xlashard`.
    """
    *before, word = words
    (commands,) = (each for each in parser._actions if each.dest == "command")
    assert isinstance(commands, argparse._SubParsersAction)
    if not before:
        summaries = [(each.dest, each.help or "") for each in commands._choices_actions]
        candidates_with_notes = iter([*summaries, *_options(parser)])
    elif before[0] in commands.choices:
        candidates_with_notes = _of_command(commands.choices[before[0]], before[1:], word)
    else:
        return
    for candidate, note in candidates_with_notes:
        # Options are for those who begin one.
        if candidate.startswith(word) and (word or not candidate.startswith("-")):
            yield candidate, re.split(r"\.\s|[:;]?\n|;", note)[0]


def _of_command(
    parser: argparse.ArgumentParser, before: Sequence[str], word: str
) -> Iterator[tuple[str, str]]:
    """Yield values of the option before the word, or options and values of arguments."""
    if "--" in before:
        return
    options = parser._option_string_actions
    # bash takes `=` for a word of its own.
    words = [each for each in before if each != "="]
    option_positions = [index for index, each in enumerate(words) if each in options]
    if option_positions and not word.startswith("-"):
        option = options[words[option_positions[-1]]]
        # An option with one value takes the next word, one with several all words up to an option.
        if option.nargs == "+" or (option.nargs != 0 and option_positions[-1] == len(words) - 1):
            yield from _values(option, word)
            return
    yield from _options(parser)
    for argument in parser._actions:
        if not argument.option_strings:
            yield from _values(argument, word)


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                yield option, (action.help or "").replace("%%", "%")


def _values(action: argparse.Action, word: str) -> Iterator[tuple[str, str]]:
    """Yield the values of an argument; none for one that may be a file or a number."""
    if action.choices is not None:
        yield from ((str(choice), "") for choice in action.choices)
    elif action.dest in _AUTOMATIC:
        yield from ((word, "") for word in _AUTOMATIC[action.dest])
    elif action.dest == "topology":
        # Several are separated by commas.
        first = "".join(word.rpartition(",")[:2])
        yield from ((f"{first}{name}", note) for name, note in _topologies())


def _topologies() -> Iterator[tuple[str, str]]:
    for name in gpu_names.common_names():
        yield name, "GPUs"
    for generation in generations.GENERATIONS:
        for chips in topology_names.chip_counts(generation):
            shape = topology_names.default_shape(generation, chips)
            # Between powers of two are too many to choose from.
            if shape is not None and chips <= _MOST_CHIPS and not chips & (chips - 1):
                name = topology_names.accelerator_type(topology_names.SliceName(generation, shape))
                yield name, f"{counted(chips, 'chip')} of {generation.title}"
