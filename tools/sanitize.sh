#!/usr/bin/env bash
# The expert kernel's stress program under ASan + UBSan and under TSan: 160 s of CPU time, 2 min 12 s on two quiet cores.
# Both are built and run side by side, each in a folder below build/ and with one compiler at a time. The argument is the number of rounds.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
rounds=${1:-40}
check() {
  local folder=build/sanitize-${1%%,*}
  "$bin/cmake" -S kernels -B "$folder" -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/$bin/ninja" -DGLM53_SANITIZE="$1" -DCMAKE_BUILD_TYPE=None >/dev/null
  "$bin/cmake" --build "$folder" --target pool_threads --parallel 1 -- --quiet
  # Address randomisation beyond what gcc 12's TSan expects makes it refuse to start.
  echo "$1: $(setarch "$(uname -m)" -R "$folder/pool_threads" "$rounds")"
}
pids=()
for sanitizer in address,undefined thread; do
  check "$sanitizer" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
exit $status
