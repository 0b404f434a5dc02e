#!/usr/bin/env bash
# Writes deploy/docker/requirements/*.txt: every Python package of an image with its version and the hashes of all its files, so that pip
# installs what was reviewed or nothing. Versions come from requirements.lock. Run it when a package of an image changes.
# `image_requirements.sh check [IMAGE...]` writes nothing: it asks the index whether every pinned package is still to be had, as a wheel for
# the images' systems. It fetches metadata only: files and hashes meet when an image is built.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=deploy/docker/requirements
tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3 -m venv "$tool"
"$tool/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9

# Debian 12 and Ubuntu 24.04 have newer ones than glibc 2.35; some wheels want more than 2.28.
uv() { env -u PIP_FIND_LINKS -u UV_FIND_LINKS UV_CACHE_DIR="$tool/cache" "$tool/bin/uv" pip "$@" --quiet --python-platform x86_64-manylinux_2_35; }

if [ "${1:-}" = check ]; then
  shift
  [ $# -gt 0 ] || set -- gateway gpu-worker-cpu cpu-expert cli build gpu-worker
  for image; do
    python=3.11
    [ "$image" = gpu-worker ] && python=3.12
    uv install --dry-run --no-build --require-hashes --python-version "$python" --target "$tool/none" -r "$folder/$image.txt"
    echo "$image: every package is to be had for CPython $python"
  done
  exit
fi

compile() { # compile IMAGE PYTHON LOCK
  uv compile --no-header --no-annotate --no-emit-index-url --python-version "$2" --generate-hashes --constraint "$3" \
    "$folder/$1.in" --output-file "$tool/$1.txt"
  { echo "# Written by tools/image_requirements.sh from $1.in and requirements.lock, for CPython $2."; cat "$tool/$1.txt"; } > "$folder/$1.txt"
}

for image in gateway gpu-worker-cpu cpu-expert cli build; do compile "$image" 3.11 requirements.lock; done
# A GPU worker has a torch of its own: the one that exllamav3's figures were measured with, not the one that the tests compare with.
grep -vE '^(torch|sympy|networkx|mpmath|fsspec|filelock)==' requirements.lock > "$tool/gpu.lock"
compile gpu-worker 3.12 "$tool/gpu.lock"
