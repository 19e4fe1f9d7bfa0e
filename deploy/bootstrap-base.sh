#!/usr/bin/env bash
# Makes the base image from Debian packages, where no image registry can be reached.
#
#   bootstrap-base.sh [IMAGE [PACKAGE...]]    default riffle-base:bookworm; does nothing if it exists
#
# Needs root, a running engine (engine.sh start) and apt-get. Packages come from the mirror of this
# machine's own apt configuration. This machine's certificate authorities go into the image, so that
# pip works in a build behind a proxy that re-signs traffic.
set -euo pipefail

IMAGE=${1:-riffle-base:bookworm}
SUITE=bookworm
PACKAGES=(python3 python3-venv ca-certificates "${@:2}")
BUNDLE=etc/ssl/certs/ca-certificates.crt
# Nothing at run time reads these; they are more than half of the tree.
UNUSED=(var/cache/apt var/lib/apt/lists var/log usr/share/doc usr/share/info usr/share/locale usr/share/man)

say() { echo "base: $*" >&2; }
die() { say "$@"; exit 1; }

# The main archive's address as apt knows it; empty where apt gives none (debootstrap has a default).
mirror() {
    # shellcheck disable=SC2016  # apt's own placeholders
    apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' "Created-By: Packages" |
        awk -v suite="$SUITE" '$1 == suite && $2 == "main" { print $3; exit }'
}

# debootstrap downloads with wget, which does not read apt's proxy.
use_apt_proxy() {
    local proxy=
    eval "$(apt-config shell proxy Acquire::http::Proxy)"
    if [ -n "$proxy" ]; then export http_proxy=$proxy; fi
}

install_debootstrap() {
    if command -v debootstrap >/dev/null; then return; fi
    say "installing debootstrap"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap >/dev/null
}

clean_up() {
    # A debootstrap that was broken off leaves /proc mounted inside the tree.
    if mountpoint -q "$work/root/proc"; then umount "$work/root/proc"; fi
    rm -rf --one-file-system "$work"
}

make_tree() {
    if ! debootstrap --variant=minbase --include="$(IFS=,; echo "${PACKAGES[*]}")" "$SUITE" "$1" "$(mirror)" >"$work/log" 2>&1; then
        tail -n 20 "$work/log" >&2
        die "debootstrap failed"
    fi
    local folder
    for folder in "${UNUSED[@]}"; do find "$1/$folder" -mindepth 1 -delete; done
    if [ -e "/$BUNDLE" ]; then install -m 644 "/$BUNDLE" "$1/$BUNDLE"; fi
}

if docker image inspect "$IMAGE" >/dev/null 2>&1; then say "$IMAGE exists"; exit 0; fi
docker version >/dev/null 2>&1 || die "no engine answers; start one with engine.sh start"
[ "$(id -u)" -eq 0 ] || die "making a base image needs root. Run it with sudo."
work=$(mktemp -d)
trap clean_up EXIT
use_apt_proxy
install_debootstrap
say "making $IMAGE from Debian $SUITE (about a minute)"
make_tree "$work/root"
tar -C "$work/root" --numeric-owner -c . |
    docker import --change 'CMD ["python3"]' - "$IMAGE" >/dev/null
say "made $IMAGE"
