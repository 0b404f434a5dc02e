#!/usr/bin/env bash
# On a machine with AVX-512 that has only gcc, Python 3 and numpy: builds the kernel library, compares every variant with the golden file, then
# measures. Takes less than four minutes when build/stock/stock-*.so travel along (they are compiled on first use otherwise, which takes longer).
# The result lands in the folder given as the first argument (default: docs/results).
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-docs/results}")
python=${PYTHON:-python3}
mkdir -p "$out" build/avx512 kernels/python/lib
common="-std=c++17 -O3 -DNDEBUG -fPIC -ffp-contract=off -fno-fast-math -fvisibility=hidden -Ikernels/include -Ikernels"
avx2="-mavx2 -mfma -mf16c -fno-schedule-insns2 -fno-tree-ter -fno-tree-pre"
avx512="$avx2 -mavx512f -mavx512bw -mprefer-vector-width=512 -Wno-uninitialized"
flags_of() {
  case "$1" in
    *_avx2.cpp) echo "$avx2" ;;
    *_avxvnni.cpp) echo "$avx2 -mavxvnni" ;;
    *_avx512bw.cpp) echo "$avx512" ;;
    *_avx512vbmi.cpp) echo "$avx512 -mavx512vnni -mavx512vbmi -mavx512vbmi2" ;;
  esac
}
if ! command -v git >/dev/null; then # the result names the commit; without git it says "unknown"
  mkdir -p build/bin && printf '#!/bin/sh\nexit 0\n' >build/bin/git && chmod +x build/bin/git
  export PATH="$PWD/build/bin:$PATH"
fi
start=$SECONDS
pids=()
for file in kernels/cpu/*.cpp; do
  case "$file" in */text_ops*) continue ;; esac
  # shellcheck disable=SC2046
  g++ $common $(flags_of "$file") -c "$file" -o "build/avx512/$(basename "$file" .cpp).o" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
g++ -shared -o kernels/python/lib/libglm53_kernels.so build/avx512/*.o -lpthread
echo "built in $((SECONDS - start)) s"
"$python" -m tests.kernels.check_golden
cores=$("$python" -c 'from kernels.python import host; print(len(host.physical_cpus()))')
# Golden first: a failure there is the news, and the figures below are taken with whatever passes.
"$python" -m bench.cpu_kernel --seconds "${SECONDS_PER_ROW:-8}" --rows 1 4 8 --threads 1 2 "$cores" --json "$out/cpu_kernel_avx512.json"
echo "all in $((SECONDS - start)) s"
