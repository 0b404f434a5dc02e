#!/usr/bin/env bash
# pip-installs this project with the named extras; every version comes from requirements.lock.
set -euo pipefail
extras=$1
echo "Installing Python packages ($extras) into .venv; the first time takes a few minutes"
# --use-pep517 and a pinned build backend: what builds the editable install is pinned as well.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable ".[$extras]"
