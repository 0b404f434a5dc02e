#!/usr/bin/env bash
# Writes deploy/docker/requirements/*.txt: every Python package of an image with its version and the hashes of all its files, so that pip
# installs what was reviewed or nothing. Versions come from requirements.lock. Run it when a package of an image changes.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=deploy/docker/requirements
tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3 -m venv "$tool"
"$tool/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9

compile() { # compile IMAGE PYTHON LOCK
  env -u PIP_FIND_LINKS -u UV_FIND_LINKS "$tool/bin/uv" pip compile --quiet --no-header --no-annotate --no-emit-index-url \
    --python-version "$2" --python-platform x86_64-manylinux_2_28 --generate-hashes --constraint "$3" \
    "$folder/$1.in" --output-file "$tool/$1.txt"
  { echo "# Written by tools/image_requirements.sh from $1.in and requirements.lock, for CPython $2."; cat "$tool/$1.txt"; } > "$folder/$1.txt"
}

for image in gateway gpu-worker-cpu cpu-expert cli build; do compile "$image" 3.11 requirements.lock; done
# A GPU worker has a torch of its own: the one that exllamav3's figures were measured with, not the one that the tests compare with.
grep -vE '^(torch|sympy|networkx|mpmath|fsspec|filelock)==' requirements.lock > "$tool/gpu.lock"
compile gpu-worker 3.12 "$tool/gpu.lock"
