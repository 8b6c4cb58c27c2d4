#!/usr/bin/env bash
# Injects faults into rings of processes and checks that no token is wrong, lost or repeated.
#
#   scripts/recovery-trials.sh [TRIALS] [SEED]
#
# Runs TRIALS trials (150 by default, 10 minutes) of `hearth execute` and as many of `hearth serve` with eight clients:
# workers are killed, stopped and woken again, and their links are dropped, broken or taken down; in every third trial
# two workers at the same time. Taking a link down needs root and `ip`. Prints the time to the next token or response
# for each fault. The exit status is 1 if a token is wrong or a request hangs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cargo build --release --bin hearth
export HEARTH_RECOVERIES="${1:-150}" HEARTH_RECOVERY="${2:-1000}" HEARTH_PROGRAM="$PWD/target/release/hearth"
for trials in ring_recovers_with_the_same_tokens eight_clients_get_their_text_whatever_happens_to_workers; do
    cargo test --test it "$trials" -- --nocapture
done
