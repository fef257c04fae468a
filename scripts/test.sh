#!/usr/bin/env bash
# All tests, with what was skipped told by name at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export RUST_BACKTRACE=0
# Two guest tests at a time; each guest keeps a core busy.
cargo test --workspace -q --no-run
cargo test --workspace --no-fail-fast -- --test-threads=2 --nocapture 2>&1 | tee "$log"
echo
grep '^SKIPPED' "$log" | sort -u || echo "nothing was skipped"
