"""`xlashard completion`: candidates for the words of a command line, and the scripts of shells."""

import subprocess

import pytest

from xlashard.cli.main import main
from xlashard.predict.targets.gpu.gpu_names import is_gpu_name, parse_gpu_name
from xlashard.predict.targets.tpu.topology_names import parse_topology_name

COMMANDS = {"compile", "completion", "doctor", "legacy", "pod", "preflight", "train"}


@pytest.fixture
def completed(capsys: pytest.CaptureFixture[str]):
    def complete(*words: str, shell: str = "bash") -> list[str]:
        assert main(["completion", shell, *words]) == 0
        return capsys.readouterr().out.splitlines()

    return complete


def test_commands_and_options_are_completed(completed) -> None:
    assert set(completed("")) >= COMMANDS
    assert completed("pref") == ["preflight"]
    assert completed("--v") == ["--version"]
    assert completed("preflight", "--to") == ["--topology"]
    assert "--mesh" in completed("preflight", "a.toml", "--")
    assert completed("completion", "") == ["bash", "zsh", "fish"]
    assert completed("preflght", "") == []


def test_topologies_are_completed(completed) -> None:
    names = completed("preflight", "--topology", "")
    assert "v5p-128" in names and "v5litepod-16" in names
    gpus = [name for name in names if is_gpu_name(name)]
    assert {"h100-32", "gb200-nvl72", "p5.48xlarge"} <= set(gpus)
    assert all(parse_gpu_name(name) for name in gpus)
    assert all(parse_topology_name(name) for name in names if name not in gpus)
    assert completed("preflight", "-t", "v5p-64,h100-3") == ["v5p-64,h100-32"]
    assert completed("compile", "-t", "v4-16") == ["v4-16"]
    assert completed("compile", "--topology", "=", "v4-16") == ["v4-16"]
    assert completed("preflight", "-t", "v5e-8,v4-16") == ["v5e-8,v4-16"]
    assert completed("preflight", "-t", "v4-16", "v4") == []


def test_the_shell_completes_files(completed) -> None:
    assert completed("train", "--config", "") == []
    assert completed("preflight", "configs/") == []
    assert completed("preflight", "--set", "a=1", "b") == []
    assert completed("pod", "--", "python", "--") == []


def test_fish_and_zsh_candidates_have_descriptions(completed) -> None:
    (fish,) = completed("preflight", "-t", "v4-16", shell="fish")
    assert fish == "v4-16\t8 chips of TPU v4"
    (zsh,) = completed("preflight", "-t", "v4-16", shell="zsh")
    assert zsh == "v4-16:8 chips of TPU v4"
    commands = dict(line.split("\t") for line in completed("", shell="fish"))
    assert set(commands) >= COMMANDS and all(commands.values())
    assert not any("%%" in line for line in completed("preflight", "--", shell="fish"))


def test_bash_script_completes_words(completed) -> None:
    check = """
xlashard() { printf '<%s>' "$@"; printf '\\ntwo words\\n'; }
COMP_WORDS=(xlashard preflight "a b" --to rest)
COMP_CWORD=3
_xlashard
printf '%s\\n' "${COMPREPLY[@]}"
"""
    script = "\n".join(completed())
    done = subprocess.run(
        ["bash", "-c", script + check], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["<completion><bash><preflight><a b><--to>", "two words"]
    assert "compdef _xlashard xlashard" in completed(shell="zsh")
    assert any(line.startswith("complete -c xlashard ") for line in completed(shell="fish"))
