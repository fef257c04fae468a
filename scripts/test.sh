#!/usr/bin/env bash
# All tests, with what was skipped told by name at the end. `test.sh sweeps`: the guest tests alone, each
# trying every step and every call where 'make test' tries some.
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
if [ "${1:-}" = sweeps ]; then
    export DEWAR_TEST_SWEEP=all
fi
cargo test --workspace -q --no-run
echo "test: built after $((SECONDS - began)) s"
if [ "${1:-}" != sweeps ]; then
    # By name, and of the whole workspace: cargo would build all of it again for some crates alone.
    libraries=()
    for file in crates/*/tests/*.rs; do libraries+=(--test "$(basename "$file" .rs)"); done
    libraries+=(--test images)
    tests libraries 2 --lib --bins "${libraries[@]}"
    tests examples 2 --doc
    tests deadlines 2 --test deadlines
fi
# A guest keeps half a core busy, and some tests only wait.
tests guests 4 --test guests
echo
# The harness may have begun the line.
grep -o 'SAMPLED .*' "$log" | sort -u || true
grep '^SKIPPED' "$log" | sort -u || echo "nothing was skipped"
if [ ${#failed[@]} -gt 0 ]; then
    echo "test: failed: ${failed[*]}"
    exit 1
fi
