#!/usr/bin/env bash
# Sets up a TPU worker, and runs jobs that outlive the connection that started them.
#
#   worker.sh setup PYTHON INSTALL       unpack ~/.xlashard/code.tar.gz into ~/job and install it
#   worker.sh start JOB GRACE COMMAND    stop earlier jobs, then start a command in ~/job
#   worker.sh follow JOB BYTES           print the log from a byte on, to the end of the job
#   worker.sh stop GRACE                 stop all jobs: SIGTERM, and SIGKILL after GRACE seconds
#   worker.sh newest                     print the name of the job that was started last
#
# A job is a folder ~/.xlashard/jobs/JOB with its `log`, the `pid` of its process group and, in the
# end, its exit `code`.
set -euo pipefail

home=$HOME/.xlashard
jobs=$home/jobs

use_venv() {
    if [ -d "$home/venv" ]; then
        export VIRTUAL_ENV=$home/venv PATH=$home/venv/bin:$PATH
    fi
}

setup() {
    local stamp
    stamp=$( (printf '%s\0' "$@" && cat "$home/code.tar.gz") | sha256sum | cut -d ' ' -f 1)
    if [ "$(cat "$home/installed" 2>/dev/null || true)" = "$stamp" ]; then
        echo "already installed"
        return
    fi
    rm -rf "$home/installed" "$HOME/job.new" && mkdir "$HOME/job.new"
    tar -xzf "$home/code.tar.gz" -C "$HOME/job.new"
    rm -rf "$HOME/job" && mv "$HOME/job.new" "$HOME/job"
    if [ -n "$1" ]; then
        # The Python of TPU VM images is older than the one that xlashard needs; uv installs it.
        export PATH=$HOME/.local/bin:$PATH
        command -v uv >/dev/null || python3 -m pip install --quiet --user uv
        uv venv --quiet --seed --allow-existing --python "$1" "$home/venv"
        use_venv
    fi
    cd "$HOME/job" && bash -euo pipefail -c "$2"
    echo "$stamp" >"$home/installed"
}

start() {
    local folder=$jobs/$1
    if [ -d "$folder" ]; then
        return # An earlier connection has started it, and broke.
    fi
    stop "$2"
    mkdir -p "$folder"
    use_venv
    cd "$HOME/job"
    # The inner shell waits for its child after SIGTERM, and then runs no further command. The outer
    # one records the exit code and ends what the command has left running in its process group.
    # shellcheck disable=SC2016
    PYTHONUNBUFFERED=1 setsid bash -c '
        trap : TERM
        echo $$ >"$2/pid"
        bash -c "trap \"exit 143\" TERM
$1"
        code=$?
        echo "$code" >"$2/code.new" && mv "$2/code.new" "$2/code"
        kill -KILL 0
    ' job "$3" "$folder" </dev/null >"$folder/log" 2>&1 &
    # Followers look for the process by its arguments, which it has after exec.
    while [ ! -s "$folder/pid" ] && [ "$SECONDS" -lt 60 ]; do
        sleep 0.02
    done
}

is_running() { # FOLDER: the pid may belong to another process since a restart of the VM
    [ ! -e "$1/code" ] && grep -qsF "$1" "/proc/$(cat "$1/pid" 2>/dev/null)/cmdline"
}

follow() {
    local folder=$jobs/$1 log=$jobs/$1/log from=$(($2 + 1))
    if is_running "$folder"; then
        tail --bytes="+$from" --follow --sleep-interval=0.2 --pid="$(cat "$folder/pid")" "$log"
    else
        tail --bytes="+$from" "$log"
    fi
    # 75: the job was killed, or the VM has restarted.
    echo "job ended with exit code $(cat "$folder/code" 2>/dev/null || echo 75)" >&2
}

stop() {
    local folder end=$((SECONDS + $1 + 1))
    for folder in "$jobs"/*; do
        if is_running "$folder"; then
            kill -TERM -- "-$(cat "$folder/pid")" || true
        fi
    done
    for folder in "$jobs"/*; do
        while is_running "$folder" && [ "$SECONDS" -lt "$end" ]; do
            sleep 0.1
        done
        if is_running "$folder"; then
            kill -KILL -- "-$(cat "$folder/pid")" || true
            echo 143 >"$folder/code"
        fi
    done
}

newest() {
    local name=
    for name in "$jobs"/*; do :; done
    if [ -d "$name" ]; then
        basename "$name"
    fi
}

verb=$1
shift
"$verb" "$@"
