#!/usr/bin/env bash
# Makes the page codecs' PTX (crates/codec-gpu/src/kernels.ptx) of their source. To be run after a change of it; needs clang
# 15 or later, with LLVM's NVPTX target.
set -euo pipefail
cd "$(dirname "$0")/../crates/codec-gpu/src"

clang=${CLANG:-$(command -v clang clang-19 clang-18 clang-17 clang-16 clang-15 | head -n 1)}
[ -n "$clang" ] || {
    echo "make-ptx.sh: clang is missing; on Debian: apt-get install clang" >&2
    exit 2
}
made=$(mktemp)
trap 'rm -f "$made"' EXIT
# The oldest GPUs and drivers that are supported: Maxwell (2014), and drivers of 2017. A driver compiles it for its own GPU.
"$clang" -x cl -cl-std=CL1.2 -cl-no-stdinc -target nvptx64-nvidia-cuda \
    -Xclang -target-cpu -Xclang sm_50 -Xclang -target-feature -Xclang +ptx60 \
    -O3 -S -include opencl_on_ptx.h kernels.cl -o "$made"
{
    echo "// Made by scripts/make-ptx.sh, of"
    sha256sum kernels.cl opencl_on_ptx.h | sed 's|^|// |'
    cat "$made"
} >kernels.ptx
