#!/usr/bin/env bash
# On a machine with AVX-512 that has gcc, Python 3 with numpy, pytest and hypothesis, and perhaps a GPU with exllamav3: compares every variant of
# the expert kernel with the golden file and the property tests, records a GPU's weights, then measures. At most 240 s in all: every part has a
# limit of its own, and the measurement keeps what it has when its time is up. The files go to the folder given as the first argument.
#
# kernels/python/lib/libglm53_kernels.so and build/stock/stock-*.so are used when they travelled along, so that both kernels come from the same
# compiler. Ours is built here when it is missing or BUILD=1; stock's takes minutes and is built before (bench/stock_kernels.py).
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-docs/results}")
python=${PYTHON:-python3}
mkdir -p "$out" build/avx512 kernels/python/lib
start=$SECONDS
status=0
step() { echo "== $1 ($((SECONDS - start)) s)"; }
left() { echo $((${LIMIT_S:-235} - (SECONDS - start))); }

build() {
  local common="-std=c++17 -O3 -DNDEBUG -fPIC -ffp-contract=off -fno-fast-math -fvisibility=hidden -Ikernels/include -Ikernels"
  local avx2="-mavx2 -mfma -mf16c -fno-schedule-insns2 -fno-tree-ter -fno-tree-pre"
  local avx512="$avx2 -mavx512f -mavx512bw -mprefer-vector-width=512 -Wno-uninitialized"
  local file flags pid pids=()
  for file in kernels/cpu/*.cpp; do
    case "$file" in
      */text_*) continue ;;
      *_avx2.cpp) flags=$avx2 ;;
      *_avxvnni.cpp) flags="$avx2 -mavxvnni" ;;
      *_avx512bw.cpp) flags=$avx512 ;;
      *_avx512vbmi.cpp) flags="$avx512 -mavx512vnni -mavx512vbmi -mavx512vbmi2" ;;
      *) flags="" ;;
    esac
    # shellcheck disable=SC2086
    g++ $common $flags -c "$file" -o "build/avx512/$(basename "$file" .cpp).o" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || return 1; done
  g++ -shared -o kernels/python/lib/libglm53_kernels.so build/avx512/*.o -lpthread
}

if ! command -v git >/dev/null; then # the result names the commit; without git it says "unknown"
  mkdir -p build/bin && printf '#!/bin/sh\nexit 0\n' >build/bin/git && chmod +x build/bin/git
  export PATH="$PWD/build/bin:$PATH"
fi
loads() { "$python" -c 'from kernels.python import expert; expert.variants()' 2>/dev/null; }
note="the library that travelled along"
if [ "${BUILD:-0}" = 1 ] || ! loads; then
  step "building the kernels"
  build || exit 1
  note="kernels built here with $(g++ --version | head -1)"
fi
lscpu | grep -E '^(Model name|CPU\(s\)|Thread|Core|Socket|NUMA|L[123]|Caches)' || true

step "golden file"
timeout 60 "$python" -m tests.kernels.check_golden || status=1

step "weights of a GPU"
if "$python" -c 'import exllamav3' 2>/dev/null; then
  if timeout 60 "$python" -m bench.record_gpu_weights "$out/gpu_weights_v1.npz"; then
    cp "$out/gpu_weights_v1.npz" tests/kernels/golden/
  else
    status=1
  fi
else
  echo "no exllamav3 with a GPU here: not recorded"
fi

step "kernel tests"
"$python" -c 'import xdist' 2>/dev/null && spread="-n 8" || spread=""
pytest=("$python" -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q -ra)
# The pool's tests look at time and CPU use, so they run alone.
# shellcheck disable=SC2086
timeout "${TESTS_S:-60}" "${pytest[@]}" $spread tests/kernels --ignore=tests/kernels/test_pool.py --ignore=tests/kernels/test_pool_scheduling.py \
  >"$out/kernel_tests.log" 2>&1 || status=1
timeout "${POOL_TESTS_S:-45}" "${pytest[@]}" tests/kernels/test_pool.py tests/kernels/test_pool_scheduling.py >>"$out/kernel_tests.log" 2>&1 || status=1
grep -E '^(FAILED|ERROR)|passed|failed|error' "$out/kernel_tests.log" || true

step "measurement"
counts=$("$python" - <<'EOF'
import os
from kernels.python import host
every, kernel = len(os.sched_getaffinity(0)), len(host.physical_cpus())
print(*sorted({t for t in (1, 2, 4, 8, 16) if t <= every} | {kernel, every}))
EOF
)
stock=()
ls build/stock/stock-1.5.1.so build/stock/stock-1.6.5.so >/dev/null 2>&1 || { stock=(--no-stock); echo "build/stock has no libraries: ours alone"; }
# shellcheck disable=SC2086
timeout "$(left)" "$python" -m bench.cpu_kernel --seconds "${SECONDS_PER_ROW:-5}" --rows 1 4 8 --threads 1 --scaling $counts \
  --note "$note" "${stock[@]}" --json "$out/cpu_kernel_avx512.json" || status=1
step "all done, status $status"
exit $status
