#!/usr/bin/env bash
# Runs a command in the folder that prepare.sh made, in this repository, for 64-bit ARM.
#
#   sudo scripts/aarch64/run.sh FOLDER cargo check -p hearth-kernels
#   sudo scripts/aarch64/run.sh FOLDER cargo test -p hearth-kernels
#   sudo QEMU_CPU=cortex-a72 scripts/aarch64/run.sh FOLDER cargo test -p hearth-kernels
#
# cargo compiles for aarch64-unknown-linux-gnu and qemu runs what it compiled. QEMU_CPU says which processor qemu is:
# cortex-a72 has NEON only, neoverse-n1 dot products of bytes besides, and max all that qemu knows (`qemu-aarch64 -cpu
# help`). Instructions are translated one by one: times of such a run say nothing about a processor.
#
# Crates are read from this machine's cargo registry; what is missing there is to be had by `cargo fetch` before.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

fail() {
    printf 'aarch64: error: %s\n' "$1" >&2
    printf 'aarch64: hint:  %s\n' "$2" >&2
    exit 1
}

[[ $# -ge 2 ]] || fail "a folder and a command are needed" "sudo $0 FOLDER cargo check -p hearth-kernels"
[[ "$(id -u)" -eq 0 ]] || fail "only root can enter another root folder" "sudo $0 $*"
folder="$(cd "$1" && pwd)"
shift
[[ -x "$folder/usr/bin/qemu-aarch64" ]] || fail "$folder is not ready" "run prepare.sh $folder first"

# sudo has a home of its own; the registry is in that of whoever called it.
home="$(getent passwd "${SUDO_USER:-root}" | cut -d: -f6)"
registry="${CARGO_HOME:-$home/.cargo}/registry"
[[ -d "$registry" ]] || fail "there is no cargo registry at $registry" "run cargo fetch --locked first"
mkdir -p "$folder/src" "$folder/cargo/registry" "$folder/target"

# The mounts are this command's own and end with it.
export FOLDER="$folder" REPOSITORY="$repository" REGISTRY="$registry"
exec unshare --mount sh -ec '
    mount --bind "$REPOSITORY" "$FOLDER/src"
    mount --bind "$REGISTRY" "$FOLDER/cargo/registry"
    mount -t proc proc "$FOLDER/proc"
    mount --rbind /dev "$FOLDER/dev"
    exec chroot "$FOLDER" env -i PATH=/usr/bin:/bin HOME=/root CARGO_HOME=/cargo CARGO_TARGET_DIR=/target \
        CARGO_NET_OFFLINE=true CARGO_BUILD_TARGET=aarch64-unknown-linux-gnu \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /" \
        QEMU_CPU="${QEMU_CPU:-max}" ${PROPTEST_CASES:+PROPTEST_CASES="$PROPTEST_CASES"} \
        sh -ec "cd /src; exec \"\$@\"" sh "$@"' sh "$@"
