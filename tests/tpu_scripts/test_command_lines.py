"""Command lines of the pages on TPUs, and of `tpu_vm.sh`, in the parsers of the real programs."""

import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.documents import read_blocks
from tests.tpu_scripts.test_jobset import SCRIPTS, jobset
from xlashard.cli.main import make_parser
from xlashard.train.stores import locate, move_command

ROOT = SCRIPTS.parent
PAGES = ("docs/tpu/pods.md", "tpu_scripts/README.md")


def list_shell_blocks() -> list[str]:
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    blocks = [block for text in texts for block in read_blocks(text) if block.language == "sh"]
    return ["\n".join((*block.code, "")) for block in blocks]


def list_commands() -> list[list[str]]:
    """Return the words of each command, and of the commands that it starts on hosts."""
    commands = []
    for block in list_shell_blocks():
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" > ")[0])
            commands.append(words)
            commands += [shlex.split(w[10:]) for w in words if w.startswith("--command=")]
            if "xlashard" in words[1:]:
                commands.append(words[words.index("xlashard", 1) :])
    return [words for words in commands if words]


def list_inline_commands() -> list[list[str]]:
    """Return the words of the commands of gcloud and kubectl in the text of the guides."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs/guides").glob("*.md")]
    spans = [span for text in texts for span in re.findall(r"`((?:gcloud|kubectl) [^`…]*)`", text)]
    # A login waits for a browser.
    return [shlex.split(span) for span in spans if not span.endswith(" login")]


def find_commands(program: str) -> list[list[str]]:
    commands = [*list_commands(), *list_inline_commands()]
    found = [words[1:] for words in commands if words[0] == program]
    assert found, program
    return found


def run_tpu_vm(words: list[str]) -> list[list[str]]:
    done = subprocess.run(
        [SCRIPTS / "tpu_vm.sh", "--dry-run", *(word for word in words if word != "--dry-run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [shlex.split(line)[1:] for line in done.stdout.splitlines()]


def test_pages_have_commands_of_known_programs_alone() -> None:
    programs = {words[0] for words in list_commands()}
    assert programs == {
        *("python", "kubectl", "gcloud", "xpk", "sky", "srun", "xlashard"),
        "tpu_scripts/tpu_vm.sh",
    }


def test_jobset_and_xlashard_parse_their_command_lines() -> None:
    for script, *words in find_commands("python"):
        assert script == "tpu_scripts/jobset.py"
        assert jobset.make_manifest(jobset.parse_arguments(words)[0])
    for words in find_commands("xlashard"):
        if words[0] != "pod":  # Its own words end at `--`; what follows is another command here.
            assert make_parser().parse_args(words).command == words[0]


@pytest.mark.slow
def test_shell_scripts_and_blocks_pass_shellcheck(tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{ROOT / '.venv/bin'}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    scripts = [SCRIPTS / "tpu_vm.sh"]
    for number, text in enumerate([jobset.SCRIPT, *list_shell_blocks()]):
        scripts.append(tmp_path / f"{number}.sh")
        scripts[-1].write_text(f"#!/usr/bin/env bash\n{text}")
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


class _Refusal(http.server.BaseHTTPRequestHandler):
    """Answers each request of gcloud as for a user who may do nothing."""

    def do_GET(self) -> None:
        body = json.dumps(
            {"error": {"code": 403, "status": "PERMISSION_DENIED", "message": "stand-in"}}
        )
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_DELETE = do_PATCH = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def gcloud_environment() -> Iterator[dict[str, str]]:
    """The environment of a gcloud that reaches nothing but a server on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        settings = {
            "API_ENDPOINT_OVERRIDES_TPU": f"http://127.0.0.1:{server.server_port}/",
            "API_ENDPOINT_OVERRIDES_COMPUTE": f"http://127.0.0.1:{server.server_port}/compute/v1/",
            "API_ENDPOINT_OVERRIDES_STORAGE": f"http://127.0.0.1:{server.server_port}/storage/v1/",
            "AUTH_DISABLE_CREDENTIALS": "true",
            "COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
            "CORE_CHECK_GCE_METADATA": "false",
            "CORE_DISABLE_PROMPTS": "1",
            "CORE_DISABLE_USAGE_REPORTING": "true",
            "CORE_PROJECT": "my-project",
        }
        own = {f"CLOUDSDK_{name}": value for name, value in settings.items()}
        yield {**os.environ, **own}
        server.shutdown()
        thread.join()


@pytest.mark.integration
def test_gcloud_parses_its_command_lines(
    gcloud_environment: dict[str, str], tmp_path: Path
) -> None:
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    commands = find_commands("gcloud")
    commands += [
        made for words in find_commands("tpu_scripts/tpu_vm.sh") for made in run_tpu_vm(words)
    ]
    commands += run_tpu_vm(["create", "my-tpu", "us-central2-b", "v4:2x2x4"])
    # Of the errors of runs in a bucket.
    move = move_command(locate("gs://bucket/runs"))
    commands += [["storage", "ls", "gs://bucket/runs"], [*move.split()[1:], "gs://b/1", "gs://b/2"]]
    # Each call takes seconds: lines with equal verbs and flags are parsed once.
    unique = {
        (*words[:4], *sorted(w.partition("=")[0] for w in words if w.startswith("-"))): words
        for words in commands
    }

    def call_gcloud(number: int, words: list[str]) -> subprocess.CompletedProcess[str]:
        # Calls at once would make one ssh key.
        home = tmp_path / str(number)
        home.mkdir()
        own = {"HOME": str(home), "CLOUDSDK_CONFIG": str(home / "gcloud")}
        environment = {**gcloud_environment, **own}
        return subprocess.run(
            ["gcloud", *words], env=environment, capture_output=True, text=True, timeout=200
        )

    with ThreadPoolExecutor(len(unique)) as pool:
        for done in pool.map(call_gcloud, range(len(unique)), unique.values()):
            # The parser ends with 2; what it accepts meets the answer of the stand-in.
            assert done.returncode == 1 and "stand-in" in done.stderr, (done.args, done.stderr)


@pytest.mark.integration
def test_kubectl_parses_its_command_lines(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    (tmp_path / "my-job.yaml").write_text(
        jobset.make_manifest(jobset.parse_arguments(find_commands("python")[0][1:])[0])
    )
    for words in find_commands("kubectl"):
        done = subprocess.run(
            ["kubectl", "--server=http://127.0.0.1:9", *words],
            cwd=tmp_path,
            env={**os.environ, "KUBECONFIG": str(tmp_path / "none")},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert "connection refused" in done.stderr or "was refused" in done.stderr, done.stderr


# Run by the Python of the tool with its command lines, in JSON. SkyPilot prints the task as its
# client sends it to the server.
PARSERS = {
    "sky": """
import json, sys
import click, sky, sky.client.cli.command
for words in json.loads(sys.argv[1]):
    command, context = sky.client.cli.command.cli, None
    while isinstance(command, click.Group):
        context = click.Context(command, parent=context, info_name="sky")
        command, words = command.get_command(context, words[0]), words[1:]
    command.make_context("sky", list(words), parent=context)
    for path in (word for word in words if word.endswith(".yaml")):
        pairs = zip(words, words[1:])
        values = [tuple(word.split("=")) for before, word in pairs if before == "--env"]
        read = sky.utils.yaml_utils.read_yaml(path)
        print(json.dumps(sky.Task.from_yaml_config(read, values).to_yaml_config()))
""",
    "xpk": """
import argparse, json, sys
from xpk.parser.core import set_parser
parser = argparse.ArgumentParser("xpk")
set_parser(parser)
for words in json.loads(sys.argv[1]):
    print(json.dumps(parser.parse_args(words).func.__name__))
""",
}


@pytest.mark.integration
@pytest.mark.parametrize("tool", PARSERS)
def test_sky_and_xpk_parse_their_command_lines_and_task(tool: str, tmp_path: Path) -> None:
    path = shutil.which(tool, path=f"{ROOT / '.venv-launchers/bin'}:{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{tool} is not installed: `make environments` does that")
    with Path(path).open(encoding="utf-8") as script:
        python = script.readline().removeprefix("#!").strip()
    lines = find_commands(tool)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [python, "-c", PARSERS[tool], json.dumps(lines)],
        cwd=ROOT,
        env={**environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    read = [json.loads(line) for line in done.stdout.splitlines()]
    if tool == "xpk":
        assert len(read) == len(lines)
        return
    (task,) = read
    assert task["resources"]["accelerators"] == {"tpu-v5litepod-8": 1}
    assert task["resources"]["use_spot"] and "--auto-resume" in task["run"]
    (mount,) = task["file_mounts"].items()
    assert mount[0] == "/mnt/runs"
    assert {"name": "my-bucket", "store": "GCS", "mode": "MOUNT"}.items() <= mount[1].items()
