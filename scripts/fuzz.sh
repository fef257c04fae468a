#!/usr/bin/env bash
# The readers of images, of migrations and of CRIU's files against altered input, for longer than `make test` does.
# usage: fuzz.sh [SECONDS]
set -euo pipefail
cd "$(dirname "$0")/.."
export DEWAR_FUZZ_SECONDS=${1:-300}
exec cargo test -p dewar-image -p dewar-migrate -p dewar-guest-oci fuzz -- --nocapture
