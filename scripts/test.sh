#!/usr/bin/env bash
# All tests but the long ones, with what was skipped told by name at the end. `test.sh long`: those. `test.sh sweeps`:
# those of guests and of deadlines, the long ones too, each trying every step and every call where the others try some.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
started=()
beside=
trap 'rm -f "$log" "$log.beside"; kill "${started[@]}" $beside 2>/dev/null || true' EXIT
# A set of tests that runs longer hangs: the longest takes 15 minutes, and a sweep hours.
limit=2400
export RUST_BACKTRACE=0
began=$SECONDS
failed=()
# One set of tests, so many at a time. They write to a file, which is shown as it grows: in a pipe, what a
# failed test left running would keep this script waiting for its end.
tests() {
    local name=$1 threads=$2 ended=0
    shift 2
    tail -n 0 -f "$log" &
    started=("$!")
    timeout --kill-after=20 "$limit" cargo test --workspace --no-fail-fast "$@" -- \
        --test-threads="$threads" --nocapture "${these[@]}" >>"$log" 2>&1 &
    started+=("$!")
    wait "${started[1]}" || ended=$?
    # tail looks once a second.
    sleep 1.5
    kill "${started[0]}"
    started=()
    if [ "$ended" = 124 ]; then echo "test: $name did not end within $limit s"; fi
    if [ "$ended" != 0 ]; then failed+=("$name"); fi
    echo "test: $name done after $((SECONDS - began)) s"
}
# The same beside the next set: for what mostly waits. What it said comes with joined.
tests_beside() {
    local threads=$1
    shift
    timeout --kill-after=20 "$limit" cargo test --workspace --no-fail-fast "$@" -- \
        --test-threads="$threads" --nocapture >"$log.beside" 2>&1 &
    beside=$!
}
joined() {
    wait "$beside" || failed+=("$1")
    beside=
    cat "$log.beside"
    cat "$log.beside" >>"$log"
    echo "test: $1 done after $((SECONDS - began)) s"
}
lane=${1:-}
# Of tests that are marked as long (#[ignore]), cargo runs none by itself.
these=()
case "$lane" in
    "") ;;
    long) these=(--ignored) ;;
    sweeps)
        these=(--include-ignored)
        export DEWAR_TEST_SWEEP=all
        limit=36000
        ;;
    *)
        echo "test: '$lane' is none of 'long' and 'sweeps'"
        exit 2
        ;;
esac
cargo test --workspace -q --no-run
echo "test: built after $((SECONDS - began)) s"
if [ -z "$lane" ]; then
    # By name, and of the whole workspace: cargo would build all of it again for some crates alone.
    libraries=()
    for file in crates/*/tests/*.rs; do libraries+=(--test "$(basename "$file" .rs)"); done
    tests_beside 1 --doc
    tests libraries 4 --lib --bins "${libraries[@]}"
    joined examples
fi
tests deadlines 2 --test deadlines
if [ -z "$lane" ]; then tests_beside 2 --test images; fi
# A guest keeps half a core busy, and some tests only wait.
tests guests 4 --test guests
if [ -n "$beside" ]; then joined images; fi
echo
# The harness may have begun the line.
grep -o 'SAMPLED .*' "$log" | sort -u || true
grep -o '[a-z_:]* \.\.\. ignored, long: .*' "$log" | sed 's/ \.\.\. ignored, / is left out; /' | sort || true
grep '^SKIPPED' "$log" | sort -u || echo "nothing was skipped"
if [ ${#failed[@]} -gt 0 ]; then
    echo "test: failed: ${failed[*]}"
    exit 1
fi
