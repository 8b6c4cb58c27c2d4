#!/usr/bin/env bash
# Installs the tools to compile and run programs for 64-bit ARM on a PC with Debian, in a separate folder.
#
#   sudo scripts/aarch64/prepare.sh FOLDER
#
# FOLDER becomes a small Debian system with rustc and cargo of the suite, the standard library and the C library of
# arm64, a linker, and qemu, which runs the programs. Outside of FOLDER the script installs only debootstrap, if it is
# missing; delete FOLDER to remove the rest. It needs about 2.4 GB, of which 450 MB are downloaded.
#
# Then: sudo scripts/aarch64/run.sh FOLDER cargo test -p hearth-kernels
#
#   SUITE    the release of Debian; its rustc must not be older than the rust-version of Cargo.toml. Default: forky
#   MIRROR   source of the packages. Default: the first one in the configuration of apt on this machine
#   SNAPSHOT 1 if the mirror is a snapshot, whose package lists have expired
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() {
    printf 'aarch64: error: %s\n' "$1" >&2
    printf 'aarch64: hint:  %s\n' "$2" >&2
    exit 1
}
has() { command -v "$1" >/dev/null 2>&1; }

folder="${1:-}"
[[ -n "$folder" ]] || fail "the folder is missing" "sudo $0 FOLDER"
[[ "$(id -u)" -eq 0 ]] || fail "only root can create a root folder" "sudo $0 $folder"
[[ ! -e "$folder" || -z "$(ls -A "$folder")" ]] || fail "$folder is not empty" "use another folder, or delete this one"
has apt-get || fail "this is not Debian or a derivative" "use a machine or a container with Debian"
if ! has debootstrap; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap
fi

suite="${SUITE:-forky}"
# Apt may be configured with other repositories; those of Debian have this label.
known="$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | head -n 1)"
mirror="${MIRROR:-${known:-http://deb.debian.org/debian}}"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[[ -r "$keys" ]] || fail "the archive keys of Debian are missing" "apt-get install debian-archive-keyring"

# Old versions of debootstrap do not know new suites by name, but the script of sid works for all of them.
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
