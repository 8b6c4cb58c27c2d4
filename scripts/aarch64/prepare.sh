#!/usr/bin/env bash
# What does a PC with Debian need to compile for 64-bit ARM and to run the result? Makes a folder with all of it.
#
#   sudo scripts/aarch64/prepare.sh FOLDER
#
# FOLDER becomes a small Debian of its own: rustc and cargo of the suite, the standard library and the C library of
# arm64, a linker for it, and qemu, which runs its programs. Nothing is installed outside of FOLDER but debootstrap, if
# it is missing; delete FOLDER to be rid of it. About 2.4 GB, of which 450 MB are downloaded.
#
# Then: sudo scripts/aarch64/run.sh FOLDER cargo test -p hearth-kernels
#
#   SUITE    the release of Debian; its rustc must not be older than the rust-version of Cargo.toml. Default: forky
#   MIRROR   where packages come from. Default: the first one that apt knows on this machine
#   SNAPSHOT 1 if the mirror is a snapshot, whose lists are older than they say they may be
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() {
    printf 'aarch64: error: %s\n' "$1" >&2
    printf 'aarch64: hint:  %s\n' "$2" >&2
    exit 1
}
has() { command -v "$1" >/dev/null 2>&1; }

folder="${1:-}"
[[ -n "$folder" ]] || fail "no folder is given" "sudo $0 FOLDER"
[[ "$(id -u)" -eq 0 ]] || fail "a root folder can be made by root only" "sudo $0 $folder"
[[ ! -e "$folder" || -z "$(ls -A "$folder")" ]] || fail "$folder is not empty" "name another folder, or delete it"
has apt-get || fail "this is not Debian or a relative" "use a machine or a container with Debian"
if ! has debootstrap; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap
fi

suite="${SUITE:-forky}"
# Apt may know other repositories; Debian's own is the one whose label says so.
known="$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | head -n 1)"
mirror="${MIRROR:-${known:-http://deb.debian.org/debian}}"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[[ -r "$keys" ]] || fail "the keys of Debian are missing" "apt-get install debian-archive-keyring"

# Old versions of debootstrap do not know new suites by name, but all are made as sid is.
mkdir -p "$folder"
debootstrap --variant=minbase --keyring="$keys" --include=ca-certificates \
    "$suite" "$folder" "$mirror" /usr/share/debootstrap/scripts/sid
if [[ "${SNAPSHOT:-}" == 1 ]]; then
    echo 'Acquire::Check-Valid-Until "false";' >"$folder/etc/apt/apt.conf.d/90snapshot"
fi
chroot "$folder" env DEBIAN_FRONTEND=noninteractive sh -ec '
    dpkg --add-architecture arm64
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends rustc cargo rust-clippy gcc libc6-dev libstd-rust-dev:arm64 \
        gcc-aarch64-linux-gnu libc6-dev:arm64 libgcc-s1:arm64 qemu-user
    apt-get clean'
printf 'aarch64: ready: %s in %s\n' "$(chroot "$folder" rustc --version)" "$folder"
