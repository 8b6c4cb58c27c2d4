#!/usr/bin/env bash
# Draws the six timelines of the prima.cpp paper's Fig. 6 from scenarios/paper/fig-6-*.yaml into docs/studies/fig-6.
set -euo pipefail
cd "$(dirname "$0")/.."
hearth="${HEARTH:-target/release/hearth}"
out="docs/studies/fig-6"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
{
    echo "# The six timelines of Fig. 6"
    echo
    echo "Written by \`scripts/fig-6.sh\` from \`scripts/../scenarios/paper/fig-6-*.yaml\`, the same bytes on every machine." \
        | sed 's#scripts/../##'
    echo "Green: reading ahead that is hidden. Orange: computing waits for the disk. The devices are made up: the paper"
    echo "names none. Weights are in memory as earlier tokens left them."
} > "$out/README.md"
for name in a b c d e f; do
    scenario="scenarios/paper/fig-6-$name.yaml"
    "$hearth" simulate "$scenario" --warm --trace "$work/trace" --json > "$work/numbers.json"
    "$hearth" report "$work/trace" -o "$work/report" > /dev/null
    cp "$work/report/gantt-simulated.svg" "$out/fig-6-$name.svg"
    question="$(sed -n '1s/^# //p' "$scenario")"
    tpot="$(sed -n '/"tpot_ms"/,/}/s/.*"mean": \([0-9.]*\).*/\1/p' "$work/numbers.json" | head -1)"
    {
        echo
        echo "## $name"
        echo
        echo "$question ${tpot%%.*} ms a token."
        echo
        echo "![timeline $name](fig-6-$name.svg)"
    } >> "$out/README.md"
done
