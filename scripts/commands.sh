#!/usr/bin/env bash
# Prints docs/reference/commands.md, generated from the help of every command.
#
#   scripts/commands.sh HEARTH > docs/reference/commands.md
set -euo pipefail
hearth=${1:?"usage: scripts/commands.sh HEARTH"}
export COLUMNS=100

printf '# Commands\n\nMade by `scripts/commands.sh` from the help of each command; a test keeps it current.\n'
verbs=$("$hearth" --help | awk '/^Commands:/ { on = 1; next } on && /^[^ ]/ { exit } on && /^  [a-z]/ { print $1 }')
printf '\n## hearth\n\n```text\n'
"$hearth" --help | sed 's/[ ]*$//'
printf '```\n'
for verb in $verbs; do
    [[ $verb == help ]] && continue
    printf '\n## hearth %s\n\n```text\n' "$verb"
    "$hearth" "$verb" --help | sed 's/[ ]*$//'
    printf '```\n'
done
