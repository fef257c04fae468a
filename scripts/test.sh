#!/usr/bin/env bash
# All tests, with what was skipped told by name at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export RUST_BACKTRACE=0
began=$SECONDS
failed=()
# One set of tests, so many at a time.
tests() {
    local name=$1 threads=$2
    shift 2
    cargo test --workspace --no-fail-fast "$@" -- --test-threads="$threads" --nocapture 2>&1 | tee -a "$log" ||
        failed+=("$name")
    echo "test: $name done after $((SECONDS - began)) s"
}
cargo test --workspace -q --no-run
echo "test: built after $((SECONDS - began)) s"
# By name, and of the whole workspace: cargo would build all of it again for some crates alone.
libraries=()
for file in crates/*/tests/*.rs; do libraries+=(--test "$(basename "$file" .rs)"); done
tests libraries 2 --lib --bins "${libraries[@]}"
tests examples 2 --doc
# A guest keeps half a core busy.
tests guests 3 --test guests
tests deadlines 2 --test deadlines
echo
grep '^SKIPPED' "$log" | sort -u || echo "nothing was skipped"
if [ ${#failed[@]} -gt 0 ]; then
    echo "test: failed: ${failed[*]}"
    exit 1
fi
