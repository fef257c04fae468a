#!/usr/bin/env bash
# Which lines of the crates 'make test' runs. Needs cargo-llvm-cov ('cargo install cargo-llvm-cov --locked') and
# rustup's llvm-tools. A process that is killed tells nothing of what it ran.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR=$PWD/target/coverage
settings=$(cargo llvm-cov show-env --sh)
eval "$settings"
# Processes of one program add to the same few files; a file for each would fill the disk.
export LLVM_PROFILE_FILE=$CARGO_TARGET_DIR/dewar-%4m.profraw
cargo llvm-cov clean --profraw-only
status=0
scripts/test.sh "$@" || status=$?
# What measures and what tests is not what is tested.
cargo llvm-cov report --summary-only --ignore-filename-regex 'crates/(bench|testkit)/|/tests/'
exit "$status"
