"""The words of a script on a command line; `tests/legacy/test_run_command.py` runs scripts."""

import sys
from pathlib import Path

from xlashard.support.program_runner import Script, ScriptOrModule, parse_script


def test_command_line_of_a_script_is_parsed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    script = ScriptOrModule("train.py", False, ("--json", "x"))
    assert parse_script(["python3", "train.py", "--json", "x"]) == Script(script, "python3")
    assert parse_script(["train.py", "--json", "x"]) == Script(script)
    warned = parse_script([sys.executable, "-W", "error", "-u", "train.py", "--json", "x"])
    assert warned == Script(script, sys.executable, ("-W", "error", "-u"))
    module = parse_script(["python", "-m", "pkg.mod", "-m"])
    assert module == Script(ScriptOrModule("pkg.mod", True, ("-m",)), "python")
    starts = {
        f"#!{sys.executable}\n": sys.executable,
        "#!/usr/bin/env python3\n": "python3",
        "#!/bin/sh\n'''exec' /long/bin/python3.12 \"$0\" \"$@\"\n' '''\n": "/long/bin/python3.12",
    }
    for start, python in starts.items():
        Path("tool").write_text(start)
        Path("tool").chmod(0o755)
        tool = parse_script([str(tmp_path / "tool"), "a"])
        assert tool == Script(ScriptOrModule(str(tmp_path / "tool"), False, ("a",)), python)
