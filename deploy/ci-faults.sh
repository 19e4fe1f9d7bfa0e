# shellcheck shell=bash
# Runs under faults, for ci-compose.sh, which sources this. Every fault comes while a batch is half
# full: the shuffler's store says so.

FAULT_SECONDS=20

# Waits in a shuffler's container for a half-full batch, says which, and runs the Python code in $2.
mid_batch() {
    inside "$1" "
import os, pathlib, signal, sys, time
from sqlalchemy import create_engine, text
from riffle.shuffler.store.schema import sqlite_url
engine = create_engine(os.environ.get('RIFFLE_SHUFFLER_STORE_URL') or sqlite_url(pathlib.Path('/data')))
half_full = text('SELECT deposited, reports, n FROM batches'
                 ' WHERE state = \'open\' AND 10 * reports BETWEEN n AND 7 * n')
until = time.monotonic() + 180
with engine.connect().execution_options(isolation_level='AUTOCOMMIT') as connection:
    while not (found := connection.execute(half_full).first()):
        if time.monotonic() > until:
            sys.exit('no batch is half full')
        time.sleep(0.02)
print(f'  batch {found.deposited} has {found.reports} of {found.n} reports', flush=True)
${2:-}
"
}

# SIGKILL to every process of the service at once; the engine starts the container again.
kill_mid_batch() { mid_batch "$1" "os.kill(-1, signal.SIGKILL)" || true; }

restarts() { docker inspect --format '{{.RestartCount}}' "$(docker compose ps --all --quiet "$1")"; }

cut_coordinator() {
    local container network=${COMPOSE_PROJECT_NAME}_core
    container=$(docker compose ps --quiet coordinator)
    docker network disconnect "$network" "$container"
    sleep "$FAULT_SECONDS"
    docker network connect --alias coordinator "$network" "$container"
}

# SIGTERM: each leaves in good order and in time, also while it works.
drain() {
    local service state before
    for service; do
        before=$SECONDS
        docker compose stop --timeout 30 "$service"
        state=$(docker inspect --format '{{.State.ExitCode}}' "$(docker compose ps --all --quiet "$service")")
        [ "$state" = 0 ] || die "$service ended with exit code $state at SIGTERM"
        say "$service ended $((SECONDS - before)) s after SIGTERM"
    done
}

# Makes each of these services process 1 of its container, without init, from the next `up` on.
as_process_1() {
    local files=$1
    shift
    printf 'services:\n' >"$work/pid-1.yaml"
    printf '  %s: {init: false}\n' "$@" >>"$work/pid-1.yaml"
    export COMPOSE_FILE=$files:$work/pid-1.yaml
}

run_is_on() {
    [ -n "$(docker compose ps --quiet --status running run)" ] || die "the run was over before the fault: $1"
}

# Checks that nothing is lost or counted twice, by the services' answers and the shuffler's store.
check_counts() {
    docker compose run --rm --no-deps -T run conservation demo --network /network \
        --coordinator-url "$1" --format json >"$work/conservation.json"
    inside "$2" "
import os, pathlib
from sqlalchemy import create_engine, text
from riffle.shuffler.store.lease_rows import reporters
from riffle.shuffler.store.schema import sqlite_url
engine = create_engine(os.environ.get('RIFFLE_SHUFFLER_STORE_URL') or sqlite_url(pathlib.Path('/data')))
with engine.connect() as connection:
    batches = connection.scalars(text('SELECT batch_id FROM batches')).all()
    print(len(set().union(*(reporters(connection, batch)[0] for batch in batches))))
    print(connection.scalar(text('SELECT sum(n) FROM batches')))
" >"$work/users"
    python3 -I - "$work" <<'PYTHON'
import json, pathlib, sys

work = pathlib.Path(sys.argv[1])
found = json.loads((work / "conservation.json").read_text())
result = json.loads((work / "results" / "summary.json").read_text())
people, expected = map(int, (work / "users").read_text().split())
sums = {name: found[name] for name in ("accepted", "held", "forwarded", "dropped", "opened", "failed")}
print(f"  {sums}, people who reported {people}")
assert found["balanced"] is True, "the messages do not balance"
assert sums["accepted"] == sums["forwarded"] == sums["opened"] > 0, "messages were lost"
assert sums["held"] == sums["dropped"] == sums["failed"] == 0, "messages were lost"
assert result["messages_counted"] == sums["opened"], "a message was counted twice"
assert people == expected == result["episodes"], "somebody was asked twice, or for nothing"
PYTHON
}

faults() {
    # The shuffler keeps its init: within a container nobody can kill process 1.
    as_process_1 compose.yaml coordinator nodes
    up_afresh
    kill_mid_batch shuffler
    say "every process of the shuffler was killed"
    run_is_on "a paused node"
    mid_batch shuffler
    docker compose pause nodes
    sleep "$FAULT_SECONDS"
    docker compose unpause nodes
    say "the nodes were paused for $FAULT_SECONDS s"
    mid_batch shuffler
    cut_coordinator
    say "the coordinator had no network for $FAULT_SECONDS s"
    run_is_on "the last"
    wait_for_run
    check_result
    check_counts https://coordinator:8400 shuffler
    [ "$(restarts shuffler)" = 1 ] || die "the shuffler was started again $(restarts shuffler) times"
    drain nodes coordinator shuffler
    say "faults: the run completed, and its counts are whole"
}

# Prints the id of the container whose coordinator drives the run.
driver() {
    inside coordinator "
import os
from sqlalchemy import create_engine, text
with create_engine(os.environ['RIFFLE_COORDINATOR_STORE_URL']).connect() as connection:
    print(connection.execute(text('SELECT holder FROM run_leases')).scalar_one().partition(':')[0])
"
}

# Runs two replicas of each service on PostgreSQL, each as process 1 of its container. One replica of
# each service is stopped and started again; the other is killed.
replicas() {
    local gone
    as_process_1 compose.yaml:compose.postgres.yaml \
        shuffler shuffler-2 coordinator coordinator-2 nodes
    if [ -z "${RIFFLE_POSTGRES_BASE:-}" ]; then
        export RIFFLE_POSTGRES_BASE=riffle-postgres-base:bookworm
        ./bootstrap-base.sh "$RIFFLE_POSTGRES_BASE" postgresql
    fi
    build_image shuffler-store
    up_afresh
    mid_batch shuffler
    drain shuffler-2 coordinator-2
    docker compose start shuffler-2 coordinator-2
    mid_batch shuffler
    docker compose kill shuffler
    say "a shuffler was killed for good"
    mid_batch shuffler-2
    gone=$(driver)
    docker kill "$gone" >/dev/null
    run_is_on "the last"
    say "the coordinator that drove the run was killed for good"
    wait_for_run
    check_result
    check_counts https://coordinator:8400,https://coordinator-2:8400 shuffler-2
    drain nodes shuffler-2
    say "replicas: the run completed, and its counts are whole"
}
