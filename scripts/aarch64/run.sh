#!/usr/bin/env bash
# Runs a command for 64-bit ARM on this repository, in the folder that prepare.sh created.
#
#   sudo scripts/aarch64/run.sh FOLDER cargo check -p hearth-kernels
#   sudo scripts/aarch64/run.sh FOLDER cargo test -p hearth-kernels
#   sudo QEMU_CPU=cortex-a72 scripts/aarch64/run.sh FOLDER cargo test -p hearth-kernels
#
# cargo compiles for aarch64-unknown-linux-gnu, and qemu runs the programs. QEMU_CPU is the emulated processor:
# cortex-a72 has only NEON, neoverse-n1 also byte dot products, and max everything that qemu supports
# (`qemu-aarch64 -cpu help`). qemu translates instructions, so times do not tell the speed of a processor.
#
# Crates are read from this machine's cargo registry. Run `cargo fetch` first to download missing ones.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

fail() {
    printf 'aarch64: error: %s\n' "$1" >&2
    printf 'aarch64: hint:  %s\n' "$2" >&2
    exit 1
}

[[ $# -ge 2 ]] || fail "the folder or the command is missing" "sudo $0 FOLDER cargo check -p hearth-kernels"
[[ "$(id -u)" -eq 0 ]] || fail "only root can enter another root folder" "sudo $0 $*"
folder="$(cd "$1" && pwd)"
shift
[[ -x "$folder/usr/bin/qemu-aarch64" ]] || fail "$folder is not ready" "run prepare.sh $folder first"

# With sudo, the registry is in the home folder of the calling user.
home="$(getent passwd "${SUDO_USER:-root}" | cut -d: -f6)"
registry="${CARGO_HOME:-$home/.cargo}/registry"
[[ -d "$registry" ]] || fail "there is no cargo registry at $registry" "run cargo fetch --locked first"
mkdir -p "$folder/src" "$folder/cargo/registry" "$folder/target"

# The mounts are private to this command and are removed when it ends.
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
