"""Every Python block of the documents runs, every link has a target, and every example is true."""

import doctest
import functools
import importlib
import inspect
import itertools
import os
import pydoc
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
import yaml

import xlashard
from tests.documents import (
    COMMAND_OUTPUT,
    commands_with_output,
    local_links,
    markdown_files,
    program,
    read_blocks,
    with_output,
)
from tests.errors.catalogue import read_topics
from tests.fork_server import python_command
from tests.goldens import check_golden
from tests.predict.targets.gpu.plugin import marks_of
from xlashard.cli.commands.option_words import read_mesh
from xlashard.cli.commands.targets import find_program, topologies_for
from xlashard.cli.main import make_parser

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [str(path.relative_to(ROOT)) for path in markdown_files(ROOT)]
# Text that differs from run to run.
DURATION = re.compile(r"\b[0-9.]+ m?s\b")
# The program arrives on stdin, so that the document itself is in the traceback.
RUN = "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'), {'__name__': '__main__'})"


def run(name: str, source: str) -> subprocess.CompletedProcess[str]:
    """Run one document's program in a process of its own, so that documents are independent."""
    return subprocess.run(
        [*python_command(), "-c", RUN, name],
        input=source,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def modules_with_examples() -> list[str]:
    names = []
    for path in sorted((ROOT / "xlashard").rglob("*.py")):
        if ">>>" in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def compiled_here(names: list[str]) -> list[Any]:
    """Return the documents as parameters, with the mark of those that compile for GPUs."""
    texts = ((name, (ROOT / name).read_text(encoding="utf-8")) for name in names)
    return [pytest.param(name, id=name, marks=marks_of(text)) for name, text in texts]


def test_the_documents_were_found() -> None:
    assert "README.md" in DOCUMENTS
    assert any(name.startswith("docs/") for name in DOCUMENTS)


def with_python(names: list[str]) -> list[str]:
    return [name for name in names if program((ROOT / name).read_text(encoding="utf-8")).strip()]


@pytest.mark.integration
@pytest.mark.parametrize("name", compiled_here(with_python(DOCUMENTS)))
def test_python_blocks_run(name: str, update_goldens: bool) -> None:
    # New output moves the lines of the blocks below it, which later output may name.
    for _ in range(2 if update_goldens else 1):
        text = (ROOT / name).read_text(encoding="utf-8")
        done = run(name, program(text))
        assert done.returncode == 0, f"{name}\n{done.stdout}\n{done.stderr}"
        made = with_output(text, done.stdout)
        if DURATION.sub("", made) != DURATION.sub("", text):
            check_golden(ROOT / name, made, update=update_goldens)


@pytest.mark.integration
@pytest.mark.parametrize("name", [n for n in DOCUMENTS if COMMAND_OUTPUT in (ROOT / n).read_text()])
def test_commands_print_the_output_shown_in_the_documents(name: str, update_goldens: bool) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = text.splitlines()
    for command, block in reversed(commands_with_output(text)):
        program, *words = shlex.split(command)
        assert program == "xlashard"
        done = subprocess.run(
            [*python_command(), "-m", program, *words],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
        lines[block.first_line - 1 : block.first_line - 1 + len(block.code)] = printed
    made = "\n".join(lines) + "\n"
    if made != text:
        check_golden(ROOT / name, made, update=update_goldens)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_local_links_have_targets(name: str) -> None:
    path = ROOT / name
    lost = [
        target
        for target in local_links(path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists() and not is_generated(path.parent / target)
    ]
    assert not lost, f"{name} links to {lost}"


@pytest.mark.integration
def test_the_pod_of_the_tutorial_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorials/pod_on_a_laptop.md").read_text(encoding="utf-8")
    hello, difference, *_ = (b for b in read_blocks(text) if b.language == "python")
    source = "\n".join(hello.code)
    (tmp_path / "hello.py").write_text(source, encoding="utf-8")
    total = next(line for line in hello.code if line.startswith("total ="))
    other = source.replace(total, "\n".join(difference.code))
    (tmp_path / "other.py").write_text(other, encoding="utf-8")
    pod = [*python_command(), "-m", "xlashard", "pod", "-n", "4", "-d", "2", "--"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run_one = functools.partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True)
    done = run_one([*pod, *python_command(), "hello.py"], env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"process (\d) of 4: \(8, 4\), sum 48.0", done.stdout)) == list("0123")
    checked = {**environment, "XLASHARD_CHECK_PROGRAMS": "1"}
    checking = [*python_command(checked), "-m", "xlashard", "run", "--", "python", "other.py"]
    done = run_one([*pod, *checking], env=checked, timeout=240)
    assert done.returncode != 0
    assert "ProgramsDifferError" in done.stdout + done.stderr


@pytest.mark.integration
def test_commands_of_tutorials_run_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run those of a program on the page, and read the programs of those that take long."""
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    blocks, commands = {}, []
    for name in ("automatic_layout", "compiled_again", "does_it_fit"):
        blocks[name] = read_blocks((ROOT / f"docs/tutorials/{name}.md").read_text())
        commands += [c for b in blocks[name] if b.language == "sh" for c in b.code]
    python = [b.code for b in blocks["automatic_layout"] if b.language == "python"]
    end = next(code for code in python if code[0] == "def program():")
    (tmp_path / "model.py").write_text("\n".join([*python[0], *end]))
    train = next(
        b.code for b in blocks["compiled_again"] if b.info.endswith("command below runs it")
    )
    (tmp_path / "train.py").write_text("\n".join(train))
    printed = ""
    for command in commands:
        settings, _, line = command.partition("xlashard ")
        variables, words = dict(each.split("=") for each in settings.split()), shlex.split(line)
        if words[0] == "preflight" and "model:program" not in words:
            arguments = make_parser().parse_args(words)
            for target in arguments.targets:
                place, *_ = topologies_for(target, arguments.topology, arguments.slices, ())
                axes = read_mesh(arguments.mesh) if "=" in (arguments.mesh or "") else None
                assert find_program(target, place, axes, ()).args
            continue
        done = subprocess.run(
            [*python_command(environment | variables), "-m", "xlashard", *words],
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed += done.stdout + done.stderr
    assert "train_step  v5e:4x4" in printed and "differs from number 1 in x" in printed


@pytest.mark.integration
def test_the_workflow_comments_on_a_pull_request(tmp_path: Path, update_goldens: bool) -> None:
    """Run the steps of the page's workflow on a merge whose first parent is the main branch."""
    name = "docs/guides/ci.md"
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = {block.language: block for block in read_blocks(text)}
    after = re.search(r"`(columns = [^`]*)`", text)
    assert after is not None
    script = "\n".join(blocks["python"].code) + "\n"
    changed = re.sub(r"^columns = .*$", after[1], script, flags=re.MULTILINE)
    assert changed != script
    for folder in ("bin", "repository", "temporary"):
        (tmp_path / folder).mkdir()
    identities = itertools.product(("AUTHOR", "COMMITTER"), ("NAME", "EMAIL"))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RUNNER_TEMP": str(tmp_path / "temporary"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "NUMBER": "7",
        **{f"GIT_{who}_{what}": "a@b.c" for who, what in identities},
    }
    command = shlex.join([*python_command(environment), "-m", "xlashard"])
    # The output is the command line of `gh`.
    for tool, line in (("xlashard", f'exec {command} "$@"'), ("gh", 'echo "$@"')):
        (tmp_path / "bin" / tool).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (tmp_path / "bin" / tool).chmod(0o755)

    def bash(code: str) -> subprocess.CompletedProcess[str]:
        shell = ["bash", "-e", "-o", "pipefail", "-c", code]
        options: dict[str, Any] = {"cwd": tmp_path / "repository", "env": environment}
        return subprocess.run(
            shell, **options, capture_output=True, text=True, timeout=240, check=False
        )

    for number, source in enumerate((script, changed)):
        (tmp_path / "repository/train.py").write_text(source, encoding="utf-8")
        done = bash(f"git init -q && git add -A && git commit -qm {number}")
        assert done.returncode == 0, done.stderr
    workflow = yaml.safe_load("\n".join(blocks["yaml"].code))
    steps = {step.get("name"): step.get("run") for step in workflow["jobs"]["explain"]["steps"]}
    done = bash(steps["Report the main branch"])
    assert done.returncode == 0, done.stderr
    done = bash(steps["Compare"])
    assert done.returncode == 1, done.stderr
    assert "worse: train_step: all-gather along model" in done.stderr
    done = bash(steps["Compare on chips"])
    assert done.returncode == 0, done.stderr
    done = bash(steps["Comment"])
    comment = tmp_path / "temporary/comment.md"
    assert done.stdout.split() == [
        *("pr", "comment", "7", "--edit-last", "--create-if-none", "--body-file", str(comment))
    ]
    made = comment.read_text(encoding="utf-8")
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == made
    lines = text.splitlines()
    shown = blocks["markdown"]
    first = shown.first_line - 1
    lines[first : first + len(shown.code)] = made.strip("\n").splitlines()
    if list(shown.code) != made.strip("\n").splitlines():
        check_golden(ROOT / name, "\n".join(lines) + "\n", update=update_goldens)


@pytest.mark.integration
def test_the_old_program_of_the_tutorial_runs_and_is_migrated(
    tmp_path: Path, update_goldens: bool
) -> None:
    name = "docs/tutorials/old_program.md"
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = read_blocks(text)
    (program,) = (b for b in blocks if b.language == "python")
    (tmp_path / "old_train.py").write_text("\n".join(program.code) + "\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run_one = functools.partial(
        subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    run_old, migrate = (b.code for b in blocks if b.language == "sh")
    start, *words = shlex.split(run_old[-1])
    done = run_one([*python_command(environment), "-m", start, *words])
    assert done.returncode == 0, done.stderr
    (shown,) = (b for b in blocks if b.language == "text")
    made = (done.stdout + done.stderr).splitlines()
    if list(shown.code) != made:
        lines = text.splitlines()
        lines[shown.first_line - 1 : shown.first_line - 1 + len(shown.code)] = made
        check_golden(ROOT / name, "\n".join(lines) + "\n", update=update_goldens)
    start, *words = shlex.split(migrate[-1], comments=True)
    assert words[-1] == "--write"
    assert run_one([*python_command(environment), "-m", start, *words]).returncode == 0
    assert run_one([*python_command(environment), "old_train.py"]).stdout == "(16, 8)\n"


def test_every_public_name_is_in_the_reference() -> None:
    pages = (ROOT / "docs/reference/api").glob("*.md")
    named = re.findall(
        r"(?<=[ `])xlashard\.(\w+)(?=[,` ])", "\n".join(page.read_text() for page in pages)
    )
    assert set(xlashard.__all__) - {"__version__"} <= set(named)


def is_generated(path: Path) -> bool:
    """Return whether the site has this page, which `docs/site_hooks.py` makes."""
    name = path.resolve().relative_to(ROOT / "docs").as_posix()
    classes = {"index", *(mistake.error for topic in read_topics() for mistake in topic.mistakes)}
    pages = {f"reference/errors/{each}.md" for each in classes}
    is_schema = re.fullmatch(r"reference/(program|script|preflight)\.schema\.json", name)
    return name in pages or is_schema is not None


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_of_the_repository_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    folders = "xlashard|tests|docs|benchmarks|configs|examples|tpu_scripts"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_exist(name: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    used = re.findall(r"^ *make +([a-z-]+)\b", (ROOT / name).read_text(), flags=re.MULTILINE)
    assert set(used) <= set(targets)


@pytest.mark.parametrize(
    "name", [pytest.param(name, id=name, marks=marks_of(name)) for name in modules_with_examples()]
)
@pytest.mark.devices(8)
def test_docstring_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags)
    for test in doctest.DocTestFinder().find(module, name):
        if not is_documented_by_jax(module, test.name):
            runner.run(test)
    result = runner.summarize(verbose=False)
    assert result.attempted > 0
    assert result.failed == 0


# JAX's own objects, and a string.
NOT_OURS = {
    "AbstractMesh",
    "AxisType",
    "Mesh",
    "P",
    "PartitionSpec",
    "UNSPECIFIED",
    "__version__",
    "get_abstract_mesh",
    "get_mesh",
    "make_mesh",
    "set_mesh",
    "use_abstract_mesh",
}
OF_2022 = [
    "Chunked",
    "FROM_GDA",
    "NoSharding",
    "OpShardingSharding",
    "PmapSharding",
    "Replicated",
    "ShardedAxis",
    "ShardingSpec",
    "Unstacked",
    "XLACompatibleSharding",
    "device_put_replicated",
    "device_put_sharded",
    "make_device_array",
    "make_sharded_device_array",
    "unstacked_shards",
]


def test_dir_lists_current_public_names() -> None:
    listed = dir(xlashard)
    modules = {name for name in listed if isinstance(getattr(xlashard, name), ModuleType)}
    assert modules == {"errors", "hlo", "multihost", "numpy", "testing", "tpu"}
    assert set(listed) == {*xlashard.__all__, *modules}
    assert not {name for name in listed if name.startswith("_")} - {"__version__"}
    assert not set(OF_2022).intersection(listed)
    for name in NOT_OURS - {"P", "UNSPECIFIED", "__version__"}:
        assert getattr(xlashard, name) is getattr(jax.sharding, name, getattr(jax, name, None))


@pytest.mark.parametrize("name", sorted({*xlashard.__all__, *OF_2022} - NOT_OURS))
def test_public_names_begin_with_a_line_and_have_an_example(name: str) -> None:
    summary, _, rest = (inspect.getdoc(getattr(xlashard, name)) or "").partition("\n")
    assert summary.endswith("."), summary
    assert rest == "" or rest.startswith("\n"), f"the summary of {name} has more than one line"
    assert "\nExample:\n    >>> " in rest


def test_help_shows_the_example_of_pjit() -> None:
    shown = pydoc.render_doc(xlashard.pjit, renderer=pydoc.plaintext)
    assert "Compile a function into one program that runs over many devices." in shown
    assert ">>> double = pjit(" in shown


def is_documented_by_jax(module: ModuleType, name: str) -> bool:
    """Return whether it is a function of `xlashard.numpy`, with its namesake's docstring."""
    member = vars(module).get(name.rpartition(".")[2])
    theirs = inspect.unwrap(member) if callable(member) else member
    return (getattr(theirs, "__module__", None) or "").startswith(("jax.", "numpy"))


SAMPLE = """# Title

```python
x = 1
```

1. In a list:

   ```python
   y = x + 1
   ```

```python no-run: needs a TPU
raise SystemExit("ran")
```

```python no-run
z = 1
```

```sh
make test
```

See [the guide](docs/guide.md#start), [JAX](https://example.org) and [above](#title).
"""


def test_blocks_keep_their_line_numbers() -> None:
    lines = program(SAMPLE).splitlines()
    assert lines[3] == "x = 1"
    assert lines[9] == "y = x + 1"
    assert [line for line in lines if line] == ["x = 1", "y = x + 1", "z = 1"]


def test_no_run_requires_a_reason() -> None:
    runs = {block.info: block.runs for block in read_blocks(SAMPLE)}
    assert runs == {
        "python": True,
        "python no-run: needs a TPU": False,
        "python no-run": True,
        "sh": False,
    }


def test_an_open_block_is_refused() -> None:
    with pytest.raises(ValueError, match="line 2 opens is never closed"):
        read_blocks("text\n```python\nx = 1\n")


def test_links_outside_the_project_are_left_alone() -> None:
    assert local_links(SAMPLE) == ["docs/guide.md"]


def test_output_block_is_replaced_by_the_printed_output() -> None:
    text = "```python\nprint(1)\nprint(2)\n```\n\n```text output\nold\n```\n\nEnd.\n"
    done = run("sample.md", program(text))
    assert with_output(text, done.stdout) == text.replace("old", "1\n2")


def test_failing_block_is_reported_with_file_and_line() -> None:
    done = run("sample.md", program("text\n\n```python\nx = 1\nassert x == 2\n```\n"))
    assert done.returncode == 1
    assert 'File "sample.md", line 5' in done.stderr
