"""`xlashard legacy`: output, files and errors of `--migrate`, and options that run no program."""

from pathlib import Path

import pytest

from tests.without_jax import HAS_JAX
from xlashard.cli.main import main

if HAS_JAX:
    import jax

OLD = "import jax\n\n\ndef f(x):\n    return jax.tree_map(abs, x)  # kept\n"
NEW = OLD.replace("tree_map", "tree.map")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "old.py"
    path.write_text(OLD)
    return path


def test_migrate_shows_a_diff_and_writes_no_file(program: Path, capsys) -> None:
    assert main(["legacy", "--migrate", str(program)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == f"--- {program}"
    assert "-    return jax.tree_map(abs, x)  # kept\n" in shown.out
    assert "+    return jax.tree.map(abs, x)  # kept\n" in shown.out
    assert shown.err == "1 file with changes; to write them, add --write\n"
    assert program.read_text() == OLD


def test_migrate_with_write_shows_the_diff_and_writes_the_file(program: Path, capsys) -> None:
    program.chmod(0o750)
    link = program.with_name("link.py")
    link.symlink_to(program)
    assert main(["legacy", "--migrate", str(link), str(link), "--write"]) == 0
    assert "+    return jax.tree.map" in capsys.readouterr().out
    assert program.read_text() == NEW
    assert link.is_symlink()
    assert program.stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in program.parent.iterdir()) == ["link.py", "old.py"]
    assert main(["legacy", "--migrate", str(program), "--write"]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "no file has a name of 2022 or 2023 to change\n")


def test_lines_for_manual_migration_are_counted(program: Path, capsys) -> None:
    program.write_text("import jax\nf = jax.soft_pmap(abs)\n")
    assert main(["legacy", "--migrate", str(program)]) == 0
    assert "1 line for a human marked by `# xlashard:`" in capsys.readouterr().err


def test_syntax_warning_of_a_file_names_the_file(program: Path) -> None:
    program.write_text("import jax\nnumber = '\\d'\n")
    with pytest.warns(SyntaxWarning, match="invalid escape") as caught:
        main(["legacy", "--migrate", str(program)])
    assert {(warning.filename, warning.lineno) for warning in caught} == {(str(program), 2)}


def test_migrate_keeps_encoding_and_line_ends(program: Path) -> None:
    old = "# -*- coding: latin-1 -*-\r\nimport jax\r\nx = jax.tree_map, 'é'\r\n"
    program.write_bytes(old.encode("latin-1"))
    assert main(["legacy", "--migrate", str(program), "--write"]) == 0
    assert program.read_bytes() == old.replace("tree_map", "tree.map").encode("latin-1")


UNREADABLE = {
    "no Python": (b"print 'x'\n", ":1 is not Python: Missing parentheses in call to 'print'"),
    "no text": (b"x = '\xff'\n", " is not text in UTF-8"),
    "no encoding": (b"# coding: nonsense\n", " is not text in UTF-8"),
    "NUL": (b"x = 1\x00\n", ""),
    "too many brackets": (b"x = " + b"(" * 5000 + b")" * 5000, "too many nested parentheses"),
    "too deep": (b"x = " + b"1 + " * 5000 + b"1\n", " is nested more than 300 deep"),
}


@pytest.mark.parametrize(("content", "why"), UNREADABLE.values(), ids=UNREADABLE)
def test_migrate_reports_an_invalid_program_and_writes_the_others(
    content: bytes, why: str, program: Path, capsys
) -> None:
    bad = program.with_name("bad.py")
    bad.write_bytes(content)
    assert main(["legacy", "--migrate", str(bad), str(program), "--write"]) == 1
    err = capsys.readouterr().err
    assert f"error: {bad}" in err and why in err
    assert "Traceback" not in err
    assert bad.read_bytes() == content
    assert program.read_text() == NEW


def test_unreadable_and_unwritable_files_are_reported(program: Path, capsys) -> None:
    folder = program.parent
    assert main(["legacy", "--migrate", str(folder / "no.py"), str(folder)]) == 1
    err = capsys.readouterr().err
    assert f"error: {folder / 'no.py'} can't be read: No such file or directory" in err
    assert f"error: {folder} can't be read: Is a directory" in err
    program.chmod(0o444)
    assert main(["legacy", "--migrate", str(program), "--write"]) == 1
    assert f"error: {program} is read-only: write chmod u+w {program}" in capsys.readouterr().err
    assert program.read_text() == OLD


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--migrate", "a.py", "--wirte"], "did you mean --write?"),
        (["old.py", "3"], "write xlashard legacy -- python old.py 3"),
        (["run", "old.py"], "write xlashard legacy -- python old.py"),
        (["--jax_enable_x64=1", "--jxa_array=0"], "unknown option --jxa_array=0"),
    ],
)
def test_unknown_options_are_refused_with_the_usage(words: list[str], advice: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["legacy", *words])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: xlashard legacy [--report[=FILE]]") and advice in err


@pytest.mark.needs_jax
@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ([], "-- python old_train.py to run it, or --migrate old_train.py"),
        (["--write"], "write --migrate FILE --write"),
        (["--migrate"], "write --migrate old_train.py"),
        (["--migrate", "--check"], "write --migrate --check -- python old_train.py"),
        (["--check", "--", "a.py"], "write --migrate --check -- python old_train.py"),
        (["--migrate", "--check", "--write", "--", "a.py"], "together with --write"),
        (["--migrate", "a.py", "--", "python", "a.py"], "together with a script after --"),
        (["--report", "--migrate", "a.py"], "together with --report"),
        (["--jax_array=0", "--migrate", "a.py"], "together with --jax_array=0"),
        (["--", "python", "no.py"], "no file 'no.py'"),
        (["--report=.", "--", "python", __file__], ". can't be written: it is a folder"),
        (["--jax_arary=0", "--", "python", __file__], "did you mean 'jax_array'?"),
        (["--jax_array=maybe", "--", "python", __file__], "expected True or False"),
    ],
)
def test_invalid_arguments_are_refused_before_a_run(words: list[str], advice: str, capsys) -> None:
    assert main(["legacy", *words]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and advice in shown.err
    assert shown.out == "" and not hasattr(jax, "tree_map")


def test_help(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["legacy", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    words = ("--migrate", "--write", "# xlashard:", "--report", "--jax_array=0", "Exit codes")
    assert all(word in shown for word in words)
