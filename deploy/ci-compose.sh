#!/usr/bin/env bash
# Containers from nothing: engine, base image, build, `docker compose up`, the run to its end, checks,
# clean up; then two runs under faults (ci-faults.sh).
#
#   ci-compose.sh [plain] [faults] [replicas]      default: all three, in this order
#
# CI runs `plain faults`; `replicas` takes five minutes more and is run by hand.
# Exit 0 if every check holds. Uses an engine that answers, or starts one (needs root then) and stops it.
# RIFFLE_CI_SECONDS (default 480) bounds each wait for a run's end; RIFFLE_BASE and
# RIFFLE_POSTGRES_BASE name base images to use as they are.
# RIFFLE_CI_KEEP=1 leaves containers, volumes and engine up, to look into a failure.
set -euo pipefail

cd "$(dirname "$0")"
export COMPOSE_PROJECT_NAME=riffle-ci COMPOSE_PROGRESS=quiet
export RIFFLE_PUBLISH_PORT=${RIFFLE_PUBLISH_PORT:-0} # 0: any free port
SHUFFLER_PORT=8401
COORDINATOR_PORT=8400
LIMIT=${RIFFLE_CI_SECONDS:-480}
work=$(mktemp -d)
engine_is_ours=

say() { echo "ci-compose: [$SECONDS s] $*"; }
die() { say "FAILED: $*"; exit 1; }

health_log() {
    local container
    for container in $(docker compose ps --quiet); do
        docker inspect --format '{{.Name}}{{with .State.Health}} {{.Status}}{{range .Log}}
  {{.ExitCode}} {{.Output}}{{end}}{{end}}' "$container"
    done
}

finish() {
    local code=$?
    if [ $code -ne 0 ] && docker version >/dev/null 2>&1; then
        docker compose ps --all || true
        health_log || true
        docker compose logs --no-color --tail 60 || true
    fi
    if [ -n "${RIFFLE_CI_KEEP:-}" ]; then exit $code; fi
    if docker version >/dev/null 2>&1; then
        docker compose down --volumes --timeout 30 || code=1
    fi
    rm -rf "$work" # after `down`: one of Compose's files may be in it
    if [ -n "$engine_is_ours" ]; then ./engine.sh stop || code=1; fi
    say "done, exit code $code"
    exit $code
}

# pip's own configuration of this machine, where an index is set in a file instead of the environment.
pip_setting() { python3 -I -m pip config get "global.$1" 2>/dev/null | grep -E '^https?://' || true; }

export_pip_settings() {
    : "${PIP_INDEX_URL:=$(pip_setting index-url)}" "${PIP_EXTRA_INDEX_URL:=$(pip_setting extra-index-url)}"
    export PIP_INDEX_URL PIP_EXTRA_INDEX_URL
}

build_image() {
    if docker compose --progress plain build "$1" >"$work/build.log" 2>&1; then return; fi
    tail -n 60 "$work/build.log"
    die "the image of $1 does not build"
}

# Runs Python in a service's container, as its user.
inside() { docker compose exec -T "$1" python3 -c "$2"; }

wait_for_run() {
    local container state
    container=$(docker compose ps --all --quiet run)
    timeout "$LIMIT" docker logs --follow "$container" || true
    state=$(docker inspect --format '{{.State.Status}} {{.State.ExitCode}}' "$container")
    [ "$state" = "exited 0" ] || die "the run is '$state' after $LIMIT s at most, expected 'exited 0'"
}

check_result() {
    docker compose cp run:/results/. "$work/results"
    python3 -I - "$work/results/summary.json" <<'PYTHON'
import json, math, sys

with open(sys.argv[1], encoding="utf-8") as file:
    result = json.load(file)
numbers = ("epsilon", "beta", "episodes", "reports_accepted", "messages_forwarded", "messages_counted",
           "regret", "optimal_value", "policy_value", "policy_switches", "wall_seconds")
for name in numbers:
    assert isinstance(result.get(name), (int, float)), f"{name} is {result.get(name)!r}, not a number"
    assert math.isfinite(result[name]), f"{name} is {result[name]}"
    print(f"  {name} {result[name]}")
assert 0 < result["epsilon"] <= 1, "the promise is epsilon at most 1"
assert 0 < result["beta"] < 1
assert result["episodes"] > 0
assert result["reports_accepted"] == result["episodes"], "an episode is not accounted for"
assert 0 < result["messages_counted"] <= result["messages_forwarded"]
# Randomness is the system's, so a rare run learns badly: a fixed bar of 95 % would fail now and then.
assert 0.5 * result["optimal_value"] <= result["policy_value"] <= result["optimal_value"] + 1e-9, (
    "the learned policy is too far from the optimum")
assert result.get("policy"), "no learned policy"
PYTHON
}

# Prints "yes" or "no": do the nodes get a connection to this host and port?
nodes_reach() {
    inside nodes "
import socket
try:
    socket.create_connection(('$1', $2), 3).close()
except OSError:
    print('no')
else:
    print('yes')
"
}

# Checks the network's trust model from inside its containers: what each can reach and read.
check_isolation() {
    local service address
    address=$(docker inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' \
        "$(docker compose ps --quiet coordinator)")
    [ "$(nodes_reach shuffler "$SHUFFLER_PORT")" = yes ] || die "nodes do not reach the shuffler"
    [ "$(nodes_reach coordinator "$COORDINATOR_PORT")" = no ] || die "nodes reach the coordinator by name"
    [ "$(nodes_reach "$address" "$COORDINATOR_PORT")" = no ] || die "nodes reach the coordinator at $address"
    for service in shuffler coordinator nodes; do
        inside "$service" "
import os, pathlib
others = {'shuffler', 'coordinator', 'nodes', 'operator'} - {'$service'}
seen = [name for name in others if any(pathlib.Path('/network', name).iterdir())]
assert not seen, f'$service sees the secrets of {seen}'
assert os.getuid() == 10001, f'$service runs as user {os.getuid()}'
assert os.statvfs('/').f_flag & os.ST_RDONLY, 'the root file system of $service is writable'
"
    done
}

prepare() {
    if ! ./engine.sh status; then engine_is_ours=1; fi
    ./engine.sh start
    say "engine is up"
    if [ -z "${RIFFLE_BASE:-}" ]; then
        export RIFFLE_BASE=riffle-base:bookworm
        ./bootstrap-base.sh "$RIFFLE_BASE"
    fi
    say "base image is $RIFFLE_BASE"
    export_pip_settings
    build_image init
    say "image is built: $(docker image inspect --format '{{.Size}}' riffle:local) bytes"
}

# Starts a new network. Removes everything of an earlier one, also after an interrupted CI run.
up_afresh() {
    docker compose down --volumes --remove-orphans --timeout 30
    docker compose up --detach --no-build
    say "services are healthy, the run has started"
}

plain() {
    as_process_1 compose.yaml shuffler coordinator nodes
    up_afresh
    wait_for_run
    check_result
    check_isolation
    drain nodes coordinator shuffler
    say "plain: result and isolation are as promised"
}

main() {
    local part
    if [ $# -eq 0 ]; then set -- plain faults replicas; fi
    for part; do
        case $part in plain | faults | replicas) ;; *) echo "usage: $0 [plain] [faults] [replicas]" >&2; exit 2 ;; esac
    done
    trap finish EXIT
    prepare
    for part; do "$part"; done
}

. ./ci-faults.sh
main "$@"
