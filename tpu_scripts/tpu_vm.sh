#!/usr/bin/env bash
# Creates a Cloud TPU, runs a command on all its workers, shows their logs, and deletes it.
#
#   tpu_vm.sh [--dry-run] create NAME ZONE TYPE [--spot] [FLAG of gcloud ...]
#   tpu_vm.sh [--dry-run] run    NAME ZONE COMMAND [WORD ...]
#   tpu_vm.sh [--dry-run] logs   NAME ZONE [WORKER]
#   tpu_vm.sh [--dry-run] delete NAME ZONE
#
# TYPE is an accelerator type (v5litepod-16, v5p-64, v6e-32), or a topology of v2 to v4 (v4:2x2x4).
# `run` copies the files that git tracks or would add in this folder to ~/job of each worker, runs
# $INSTALL there and then COMMAND, whose output is in ~/job.log. The job outlives the connection; the
# next `run` stops it. The command travels in a file, so no list of processes shows its secrets.
set -euo pipefail

INSTALL=${INSTALL:-python -m pip install --quiet --editable '.[tpu,train]'}

fail() {
    printf 'tpu_vm.sh: %s\n' "$*" >&2
    exit 2
}

vm() { # Runs gcloud, or prints its command line.
    local words=(gcloud compute tpus tpu-vm "$1" "${@:2}" --zone="$zone" --quiet)
    if [ -n "$dry" ]; then
        printf '%q ' "${words[@]}" && echo
    else
        "${words[@]}"
    fi
}

create() {
    local type=${1:-} image flags
    case $type in
        tpu7x* | v7* | ironwood*) fail "TYPE=$type: the Cloud TPU API ends with v6e: use jobset.py (GKE)" ;;
        v[234]:*) flags=(--type="${type%%:*}" --topology="${type#*:}") ;;
        *:*) fail "TYPE=$type: gcloud has --topology for v2, v3 and v4 alone: write a size with its" \
            "default topology, such as v5p-64, or use jobset.py (GKE)" ;;
        v5e-*) fail "TYPE=$type: gcloud's name is v5litepod-${type#*-}" ;;
        *) flags=(--accelerator-type="$type") ;;
    esac
    case $type in
        v[234][-:]?*) image=tpu-ubuntu2204-base ;;
        v5litepod-?*) image=v2-alpha-tpuv5-lite ;;
        v5p-?*) image=v2-alpha-tpuv5 ;;
        v6e-?*) image=v2-alpha-tpuv6e ;;
        *) fail "TYPE='$type' is unknown: write an accelerator type, such as v5litepod-16" ;;
    esac
    vm create "$name" "${flags[@]}" --version="$image" "${@:2}"
}

run() {
    [ $# -gt 0 ] || fail "COMMAND is missing: write run NAME ZONE xlashard train --config FILE ..."
    umask 077
    local folder && folder=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$folder'" EXIT
    git ls-files -z --cached --others --exclude-standard --deduplicate |
        while IFS= read -r -d '' file; do [ ! -e "$file" ] || printf '%s\0' "$file"; done |
        tar --null --files-from=- -czf "$folder/job.tgz"
    # After SIGTERM the job's shell waits for its child, and then runs no further command.
    {
        echo "trap 'exit 143' TERM"
        printf 'export PYTHONUNBUFFERED=1 LAUNCHER_ATTEMPT=%q\n' "${LAUNCHER_ATTEMPT:-1}"
        printf '%q ' "$@" && echo
    } >"$folder/job.command"
    cat >"$folder/job.start" <<EOF
set -euo pipefail
pid=\$(cat ~/job.pid 2>/dev/null || echo none)
if grep -qs job.command "/proc/\$pid/cmdline"; then
    kill -TERM -- "-\$pid"
    timeout 60 tail --follow --pid="\$pid" /dev/null || kill -KILL -- "-\$pid"
fi
rm -rf ~/job && mkdir ~/job && tar -xzf ~/job.tgz -C ~/job && cd ~/job
# The Python of TPU VMs is older than the one that xlashard needs; uv installs it.
export PATH=~/job.venv/bin:~/.local/bin:\$PATH
[ -e ~/job.venv ] || { python3 -m pip install --quiet --user uv && uv venv --quiet --seed --python 3.12 ~/job.venv; }
$INSTALL
mv -f ~/job.log ~/job.log.old 2>/dev/null || true
: >~/job.log
setsid bash ~/job.command </dev/null >>~/job.log 2>&1 &
echo \$! >~/job.pid
tail --lines=+1 --follow --pid=\$! ~/job.log || true
wait \$!
EOF
    vm scp "$folder"/job.{tgz,command,start} "$name:" --worker=all
    vm ssh "$name" --worker=all --command='bash job.start'
}

if [ "${1:-}" = --dry-run ]; then dry=1 && shift; else dry=; fi
verb=${1:-} name=${2:-} zone=${3:-}
[[ $verb =~ ^(create|run|logs|delete)$ ]] || fail "write create, run, logs or delete, not '$verb'"
[[ $name =~ ^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$ ]] || fail "NAME='$name' is invalid: up to 63 small" \
    "letters, digits and hyphens, from a letter on: write my-tpu"
[[ $zone =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || fail "ZONE='$zone' is invalid: write us-west4-a"
shift 3
case $verb in
    logs) vm ssh "$name" --worker="${1:-0}" --command="tail --lines=+1 --follow --pid=\$(cat job.pid) job.log" ;;
    delete) vm delete "$name" ;;
    *) "$verb" "$@" ;;
esac
