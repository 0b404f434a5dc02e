#!/usr/bin/env bash
# Installs the Debian packages that the set-up needs: as root through apt, otherwise prints the one line to run and stops.
# `debian_packages.sh test` also installs what only the tests need, `debian_packages.sh deploy` what runs containers.
set -euo pipefail

declare -A needs=(
  [python3]="python3" [python3-venv]="" [python3-dev]="" [g++]="g++" [git]="git" [ca-certificates]="" [bsdextrautils]="column"
)
# The tests start Redis, Prometheus and node-exporter of their own on free ports; those that Debian may start as services are left alone.
if [ "${1:-}" = test ]; then
  needs[redis-server]="redis-server"
  needs[prometheus]="promtool"
  needs[prometheus-node-exporter]="prometheus-node-exporter"
fi
if [ "${1:-}" = deploy ]; then
  for package in podman runc netavark aardvark-dns iptables catatonit mmdebstrap; do needs[$package]=$package; done
fi
missing=()
has_package() { dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }

if ! command -v dpkg-query >/dev/null; then
  # Not Debian: check what the packages would bring and let the person install it in their own way.
  python3 -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11)' 2>/dev/null || missing+=("python >= 3.11 with venv")
  command -v g++ >/dev/null || missing+=("g++ with C++17")
  if [ "${1:-}" = test ]; then
    command -v redis-server >/dev/null || missing+=("redis-server >= 6")
    command -v promtool >/dev/null || missing+=("prometheus >= 2.42")
    command -v prometheus-node-exporter >/dev/null || missing+=("prometheus-node-exporter")
  fi
  if [ "${1:-}" = deploy ]; then
    for program in podman runc mmdebstrap; do command -v "$program" >/dev/null || missing+=("$program"); done
  fi
  [ ${#missing[@]} -eq 0 ] && exit 0
  printf 'This is not Debian. Please install: %s\n' "$(IFS=,; echo "${missing[*]}")" >&2
  exit 1
fi

for package in "${!needs[@]}"; do
  has_package "$package" || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
line="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
if [ "$(id -u)" -eq 0 ]; then
  echo "Installing Debian packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  printf 'Debian packages are missing. Run this line, then try again:\n\n  sudo sh -c "%s"\n\n' "$line" >&2
  exit 1
fi
