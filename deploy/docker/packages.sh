#!/bin/sh
# packages.sh IMAGE: the image's Python packages into /opt/venv, by hash. Needs pip in /opt/tools. No pip in the result.
set -eu
python3 -m venv --without-pip /opt/venv
/opt/tools/bin/pip --python /opt/venv/bin/python install --no-compile --require-hashes --only-binary :all: \
  -r "deploy/docker/requirements/$1.txt"
# Packages' own tests and what only compilers read.
find /opt/venv -type d \( -name tests -o -name test \) -path '*/site-packages/*' -prune -exec rm -rf {} +
find /opt/venv \( -name '*.pyi' -o -name '*.pxd' -o -name '*.pyx' \) -type f -delete
/opt/venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/venv/lib
