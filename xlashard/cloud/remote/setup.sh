#!/usr/bin/env bash
# Prepares a worker for jobs: unpacks the code, finds a Python that is new enough, installs.
#
#   setup.sh FOLDER PYTHON INSTALL
#
#   FOLDER   where the code goes, below the home folder; what was there is replaced
#   PYTHON   the oldest Python that will do, such as 3.12; empty: what is there, without a venv
#   INSTALL  a shell command, run in that folder with that Python first on the PATH
#
# Once more with the same code and words changes nothing and takes no time.
set -euo pipefail

folder=$HOME/${1:?usage: setup.sh FOLDER PYTHON INSTALL}
wanted=${2-}
install=${3-}
room=$HOME/.xlashard
venv=$room/venv

stamp=$( (printf '%s\0' "$@"; cat "$room/code.tar.gz") | sha256sum | cut -d ' ' -f 1)
if [ -d "$folder" ] && [ "$(cat "$room/installed" 2>/dev/null || true)" = "$stamp" ]; then
    echo "nothing to do: the same code is installed"
    exit 0
fi
rm -f "$room/installed"

# Beside first, so that a setup that is broken off leaves no half of it.
rm -rf "$folder.new"
mkdir -p "$folder.new"
tar -xzf "$room/code.tar.gz" -C "$folder.new"
rm -rf "$folder"
mv "$folder.new" "$folder"

suits() {
    command -v "$1" >/dev/null && "$1" - "$wanted" <<'PYTHON' 2>/dev/null
import ensurepip, sys, venv
wanted = tuple(int(part) for part in sys.argv[1].split("."))
raise SystemExit(sys.version_info[: len(wanted)] < wanted)
PYTHON
}

make_venv() {
    local name
    if [ -x "$venv/bin/python" ] && suits "$venv/bin/python"; then
        return
    fi
    rm -rf "$venv"
    for name in python3 "python$wanted" python3.13 python3.12; do
        if suits "$name"; then
            echo "a new environment with $("$name" --version)"
            "$name" -m venv "$venv"
            return
        fi
    done
    # Images of TPU VMs come with a Python that is older. uv brings one along.
    if ! command -v uv >/dev/null; then
        echo "installing uv, which brings Python $wanted"
        python3 -m pip install --quiet --user uv
        PATH=$HOME/.local/bin:$PATH
    fi
    uv venv --quiet --seed --python "$wanted" "$venv"
    echo "a new environment with $("$venv/bin/python" --version)"
}

if [ -n "$wanted" ]; then
    make_venv
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
fi
if [ -n "$install" ]; then
    cd "$folder"
    bash -euo pipefail -c "$install"
fi
echo "$stamp" >"$room/installed"
echo "ready"
