"""Golden files: text that a test expects, updated by `make goldens`."""

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest


def check_golden(path: Path, text: str, *, update: bool, by: str = "make goldens") -> None:
    """Compare a text with a file, or write it there.

    Args:
        path: The golden file.
        text: Current text.
        update: Write, do not compare.
        by: The command that writes it.
    """
    text = text.rstrip() + "\n"
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    diff = difflib.unified_diff(
        old.splitlines(), text.splitlines(), str(path), "now", lineterm="", n=2
    )
    assert old == text, "\n".join([*diff, f"if this is as it should be: {by}"])


def check_errors(
    path: Path,
    calls: Mapping[str, Callable[[], object]],
    kind: type[Exception],
    *,
    update: bool,
) -> dict[str, Exception]:
    """Check that all calls raise errors of one class, with the messages of a golden file.

    Args:
        path: The golden file.
        calls: The calls by the headings of their messages.
        kind: The class, of which a message may name a subclass.
        update: Write, do not compare.

    Returns:
        The errors, for checks of their attributes.
    """
    errors = {}
    for heading, call in calls.items():
        with pytest.raises(kind) as caught:
            call()
        errors[heading] = caught.value
    texts = {name: f"{type(error).__name__}: {error}" for name, error in errors.items()}
    check_golden(path, join_sections(texts), update=update)
    return errors


def check_no_others(folder: Path, names: set[str], *, update: bool) -> None:
    """Check that a folder holds these golden files and no more; an update removes the others."""
    others = [path for path in sorted(folder.glob("*")) if path.name not in names]
    if update:
        for path in others:
            path.unlink()
        return
    assert not others, f"no test expects {[p.name for p in others]}: make goldens"


def join_sections(sections: Mapping[str, str]) -> str:
    """Join named texts into one."""
    return "\n".join(f"## {name}\n{text}\n" for name, text in sections.items())
