#!/usr/bin/env bash
# Installs on this machine without containers: packages, kernels and, with an NVIDIA GPU, exllamav3 and the CUDA kernels. Then says what
# `glm53 doctor` found and how to start.
#
#   scripts/install.sh [--cpu | --gpu]      default: --gpu where nvidia-smi answers
#
# It can be repeated: what is there and up to date is left alone. Everything goes into this folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

device=""
for option in "$@"; do
  case $option in
    --cpu | --gpu) device=${option#--} ;;
    *)
      [ "$option" = --help ] || echo "There is no option $option." >&2
      sed -n '2,/^set/p' "$0" | sed -n 's/^# \{0,1\}//p'
      [ "$option" = --help ] && exit 0 || exit 2
      ;;
  esac
done
if [ -z "$device" ]; then
  if nvidia-smi -L >/dev/null 2>&1; then device=gpu; else device=cpu; fi
fi

command -v make >/dev/null || { echo "Please install make (Debian: apt-get install make), then run this again." >&2; exit 1; }
make setup

if [ "$device" = gpu ]; then
  command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] || {
    echo "The GPU needs the CUDA toolkit (nvcc, 13.0) to build exllamav3. Install it and run this again, or use --cpu." >&2
    exit 1
  }
  # torch looks for nvcc and ninja on PATH; ninja is in the environment.
  export PATH=$root/.venv/bin:$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
  cuda=$(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
  case $cuda in
    13.*) ;;
    *)
      echo "$(command -v nvcc) is of CUDA ${cuda:-?}; exllamav3 is built with CUDA 13. Install that toolkit and put its bin folder first on PATH." >&2
      exit 1
      ;;
  esac
  mapfile -t packages < <(grep -E '^(exllamav3|torch)==' deploy/docker/requirements/gpu-worker.in)
  echo "Installing ${packages[*]} and building exllamav3's extension; this takes a while"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "${packages[@]}"
  TORCH_EXTENSIONS_DIR=$root/build/extensions .venv/bin/python deploy/docker/exllamav3_extension.py
  .venv/bin/python tools/build_kernels.py
fi

echo
.venv/bin/glm53 doctor || true
cat <<TEXT

Start it from any folder:

  GLM53_ROOT=$root $root/.venv/bin/glm53 serve

with GLM53_MODEL_DIR=/path/to/the/checkpoint for another model than the small one. As a service: docs/install.md.
TEXT
