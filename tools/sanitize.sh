#!/usr/bin/env bash
# The expert kernel's stress program under ASan + UBSan and under TSan. A build folder for each below build/; a minute or two on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
for sanitizer in address,undefined thread; do
  folder=build/sanitize-${sanitizer%%,*}
  "$bin/cmake" -S kernels -B "$folder" -G Ninja -DCMAKE_MAKE_PROGRAM="$PWD/$bin/ninja" -DGLM53_SANITIZE="$sanitizer" -DCMAKE_BUILD_TYPE=None >/dev/null
  "$bin/cmake" --build "$folder" --target pool_threads -- --quiet
  # Address randomisation beyond what gcc 12's TSan expects makes it refuse to start.
  setarch "$(uname -m)" -R "$folder/pool_threads" "${1:-40}"
done
