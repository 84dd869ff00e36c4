"""Programs as Python text, which is both printed and run."""

from collections.abc import Iterable

from tests.core.pjit.random_programs.description import Block, Program, Step

INDENT = "    "


def program_text(program: Program) -> str:
    """Return the module of a program.

    It uses the names of `running.environment`, and binds those that `running.Module` reads.
    """
    args = program.arguments
    ins = [_wrapped(a.resource, a.wrapped.replace("checked", "")) for a in args]
    placed = [a.placed or "None" for a in args]
    donated = tuple(i for i, a in enumerate(args) if a.donated)
    names = [r.value.name for r in program.results]
    outs = [r.resource for r in program.results]
    lines = [
        f'"""Random program {program.seed}."""',
        "",
        f"axes = {dict(program.axes)}",
        f"first = {program.first}",
        f"backwards = {program.backwards}",
        f"explicit = {program.explicit}",
        f"automatic = {program.automatic}",
        f"manner = {program.manner!r}",
        f"call = {program.call!r}",
        f"partitioner = {program.partitioner!r}",
        f"arguments = {_tuple(_wrapped(a.text, a.wrapped) for a in args)}",
        f"placed = {_tuple(placed)}",
        f"in_shardings = {program.ins or _tuple(ins)}",
        f"out_shardings = {program.prefix or _contained(outs, program.container)}",
        f"donated = {donated}",
        f"options = {dict(program.options)}",
        f"bare = {program.bare}",
        f"exact = {tuple(r.value.exact for r in program.results)}",
        "",
        "",
        f"def f({', '.join(a.value.name for a in args)}):",
        *(f"{INDENT}{a.value.name} = unwrap({a.value.name})" for a in args if a.wrapped),
        *_body(program.steps, _contained(names, program.container), INDENT),
    ]
    return "\n".join(lines) + "\n"


def steps_text(steps: Iterable[Step], indent: str = "") -> list[str]:
    """Return the lines of statements."""
    lines = []
    for step in steps:
        for block in step.blocks:
            lines += block_text(block, indent)
        targets = ", ".join(t.name for t in step.targets)
        lines.append(f"{indent}{targets} = {step.text}")
    return lines


def block_text(block: Block, indent: str) -> list[str]:
    """Return the lines of an inner function."""
    params = ", ".join(p.name for p in block.params)
    result = block.results[0] if len(block.results) == 1 else _tuple(block.results)
    lines = [f"{indent}{block.decorator}"] if block.decorator else []
    lines.append(f"{indent}def {block.name}({params}):")
    lines += _body(block.steps, result, indent + INDENT)
    return lines + [indent + rule for rule in block.rules]


def _body(steps: Iterable[Step], result: str, indent: str) -> list[str]:
    return [*steps_text(steps, indent), f"{indent}return {result}"]


def _tuple(texts: Iterable[str]) -> str:
    texts = tuple(texts)
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _wrapped(text: str, container: str) -> str:
    if container == "checked":
        return f"Checked({text})"
    return f"{{'a': {text}, 'none': None}}" if container else text


def _contained(texts: list[str], container: str) -> str:
    if container == "bare" and len(texts) == 1:
        return texts[0]
    if container == "dict":
        return (
            "{"
            + ", ".join(f'"{name}": {t}' for name, t in zip("abcdefgh", texts, strict=False))
            + "}"
        )
    if container == "holes":
        return f"{{'first': {texts[0]}, 'none': None, 'rest': {_tuple(texts[1:])}}}"
    if container == "nested":
        return _tuple([texts[0], '{"rest": [' + ", ".join(texts[1:]) + "]}"])
    return _tuple(texts)
