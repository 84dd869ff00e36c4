"""Find the code blocks of Markdown files and make programs of them."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPENING = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^`]*)$")
# The info of a block that shows all output of the Python blocks since the block of output before.
OUTPUT = "text output"
# The info of a block that shows the output of the command in the `sh` block before it.
COMMAND_OUTPUT = "text command output"
MARK = "-- output ends --"
NO_RUN = re.compile(r"^python\s+no-run\s*:\s*\S+")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """Fenced block of a Markdown file.

    Attributes:
        info: Text after the opening fence: `python`, `sh`, `python no-run: why`.
        first_line: Number of the block's first line of code in the file, from 1.
        code: The lines, without the indent of the fence.
    """

    info: str
    first_line: int
    code: tuple[str, ...]

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]

    @property
    def runs(self) -> bool:
        """Return whether this is Python to run; only `no-run` with a reason exempts it."""
        return self.language == "python" and not NO_RUN.match(self.info)


def read_blocks(text: str) -> list[Block]:
    """Return all fenced blocks of a Markdown text, in order.

    Raises:
        ValueError: A fence is never closed.
    """
    return list(_blocks(iter(enumerate(text.splitlines(), start=1))))


def _blocks(lines: Iterator[tuple[int, str]]) -> Iterator[Block]:
    for number, line in lines:
        opening = OPENING.match(line)
        if not opening:
            continue
        indent, fence = opening["indent"], opening["fence"]
        code: list[str] = []
        for _, inner in lines:
            if inner.strip() == fence:
                break
            code.append(inner.removeprefix(indent))
        else:
            raise ValueError(f"the code block that line {number} opens is never closed")
        yield Block(opening["info"].strip(), number + 1, tuple(code))


def program(text: str) -> str:
    """Join all Python blocks into a program, each line under the number it has in the file.

    Where the document shows output, the program prints `MARK`, at which `with_output` splits the
    output.
    """
    lines: list[str] = []
    for block in read_blocks(text):
        if block.runs or block.info == OUTPUT:
            lines += [""] * (block.first_line - 1 - len(lines))
            lines += block.code if block.runs else [f"print({MARK!r})"]
    return "\n".join(lines) + "\n"


def with_output(text: str, printed: str) -> str:
    """Put the output of a document's program into its output blocks.

    Args:
        text: The document.
        printed: What `program(text)` printed.
    """
    parts = iter(printed.split(f"{MARK}\n"))
    lines, at = text.splitlines(), 0
    made: list[str] = []
    for block in read_blocks(text):
        if block.info == OUTPUT:
            made += [*lines[at : block.first_line - 1], *next(parts).strip("\n").splitlines()]
            at = block.first_line - 1 + len(block.code)
    return "\n".join([*made, *lines[at:]]) + "\n"


def commands_with_output(text: str) -> list[tuple[str, Block]]:
    """Return commands of `sh` blocks, each with the block that shows its output."""
    blocks = read_blocks(text)
    return [
        ("\n".join(before.code), block)
        for before, block in itertools.pairwise(blocks)
        if before.language == "sh" and block.info == COMMAND_OUTPUT
    ]


def local_links(text: str) -> list[str]:
    """Return the targets of the links that point into the project, without their anchors."""
    targets = [match["target"].partition("#")[0] for match in LINK.finditer(text)]
    return [target for target in targets if target and "://" not in target]


def markdown_files(root: Path) -> list[Path]:
    """Return the project's documents."""
    patterns = ("*.md", "docs/**/*.md", "examples/*.md")
    return [path for pattern in patterns for path in sorted(root.glob(pattern))]
