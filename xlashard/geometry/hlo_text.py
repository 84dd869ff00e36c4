"""Syntax of HLO text: shardings and aliases, read into their plain parts."""

import re
from collections.abc import Iterator
from typing import Any, Literal, NoReturn, get_args

from xlashard.errors import ShardingTextError

type Subgroup = Literal["manual", "unreduced", "replicated"]

type Maker = tuple[str, tuple[Any, ...]]
"""The class method of `TileAssignment` that makes a sharding, and its arguments; only the syntax of
the text is checked. The arguments of `tuple_of` are the makers of its elements."""


def read_sharding(text: str) -> Maker:
    """Read the text of an HLO sharding; `metadata={...}` is skipped.

    Raises:
        ShardingTextError: The text is not in that syntax.
    """
    reader = _ShardingReader(text)
    parsed = _sharding(reader, nested=False)
    reader.end()
    return parsed


_NUMBER = r"\d{1,18}\b"
"""Enough for any count of devices, and never too long for `int`."""


_BLANKS = r"(?:\s|/\*.*?\*/)*+"


class _ShardingReader:
    """Cursor over the text of a sharding."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.offset = 0

    def take(self, pattern: str) -> str | None:
        """Take the match of `pattern` after any blanks and comments; return None without one."""
        match = re.compile(rf"{_BLANKS}({pattern})").match(self.text, self.offset)
        if match is None:
            return None
        self.offset = match.end()
        return match[1]

    def expect(self, pattern: str, what: str) -> str:
        """Take a match of `pattern`, and raise an error without one."""
        parsed = self.take(pattern)
        if parsed is None:
            self.fail(f"expected {what}")
        return parsed

    def numbers(self, what: str) -> tuple[int, ...]:
        """Read numbers with commas between them, possibly an empty list."""
        first = self.take(_NUMBER)
        parsed = [] if first is None else [int(first)]
        while parsed and self.take(","):
            parsed.append(self.number(f"another number of {what}"))
        return tuple(parsed)

    def number(self, what: str) -> int:
        """Read one number from 0 on."""
        return int(self.expect(_NUMBER, what))

    def items(self) -> Iterator[None]:
        """Yield before each item of a list, with commas between, until a brace ends it."""
        first = True
        while self.take(r"\}") is None:
            if not first:
                self.expect(",", "',' or '}'")
            first = False
            yield

    def end(self) -> None:
        """Check that nothing but blanks is left."""
        if self.take("$") is None:
            self.fail("expected the end of the text")

    def fail(self, message: str) -> NoReturn:
        rest = self.text[self.offset :].strip()
        at = f"at {rest[:30]!r}" if rest else "at its end"
        shown = self.text if len(self.text) <= 120 else f"{self.text[:117]}..."
        raise ShardingTextError(
            f"{message} {at} of the HLO sharding {shown!r} (character {self.offset})",
            text=self.text,
            offset=self.offset,
        )


_WORDS = ("replicated", "manual", "unreduced", "unknown")


def _sharding(reader: _ShardingReader, *, nested: bool) -> Maker:
    reader.expect(r"\{", "'{'")
    if reader.take(r"(?=\{|\})") is not None:
        if nested:
            reader.fail("expected a sharding, not a tuple within a tuple,")
        return "tuple_of", tuple(_sharding(reader, nested=True) for _ in reader.items())
    word = reader.expect(
        rf"(?:{'|'.join(_WORDS)}|maximal|devices)\b",
        f"{', '.join(_WORDS)}, maximal or devices=[...]",
    )
    match word:
        case "devices":
            parsed = _tiled(reader)
        case "maximal":
            reader.expect(r"device\s*=", "'device='")
            parsed = "maximal", (reader.number("a device number"),)
        case _:
            parsed = word, ()
    if reader.take(r"metadata\s*=\s*(?=\{)") is not None:
        _skip_braces(reader)
    reader.expect(r"\}", "'}'")
    return parsed


def _tiled(reader: _ShardingReader) -> Maker:
    reader.expect(r"=\s*\[", "'=['")
    dims = reader.numbers("tile dims")
    reader.expect(r"\]", "']'")
    if reader.take("<=") is None:
        devices = reader.numbers("devices")
        if not devices:
            reader.fail("expected '<=[...]' or a list of devices")
        return "listed", (dims, devices, _subgroups(reader))
    reader.expect(r"\[", "'['")
    reshape_dims = reader.numbers("reshape dims")
    reader.expect(r"\]", "']'")
    perm: tuple[int, ...] = ()
    if reader.take(r"T\s*\(") is not None:
        perm = reader.numbers("the transposition")
        reader.expect(r"\)", "')'")
    return "iota", (dims, reshape_dims, perm, _subgroups(reader))


def _subgroups(reader: _ShardingReader) -> tuple[str, ...]:
    if reader.take(r"last_tile_dim_replicate\b") is not None:
        return ("replicated",)
    if reader.take(r"last_tile_dims\s*=\s*\{") is None:
        return ()
    known = get_args(Subgroup.__value__)
    kind = rf"(?:{'|'.join(known)})\b"
    return tuple(reader.expect(kind, " or ".join(known)) for _ in reader.items())


def _skip_braces(reader: _ShardingReader) -> None:
    depth = 0
    while True:
        token = reader.expect(r'[{}]|"(?:[^"\\]|\\.)*"|[^{}"]+', "'}' after metadata")
        depth += (token == "{") - (token == "}")
        if depth == 0:
            return


def read_aliases(text: str) -> dict[int, int]:
    """Return for each result that aliases an argument the position of that argument.

    Args:
        text: The attribute `input_output_alias` of a module.

    Example:
        >>> read_aliases("{ {1}: (2, {}, may-alias) }")
        {1: 2}
    """
    aliases = _ALIAS.findall(text)
    # Arguments that are passed as one tuple are its elements.
    return {int(result or 0): int(part or argument) for result, argument, part in aliases}


_ALIAS = re.compile(r"\{(\d*)[\d,\s]*\}: \((\d+), \{(\d*)")
