#!/usr/bin/env bash
# Proves the two commands of the README on a machine where nothing was installed by hand: an empty Debian 12 in a chroot that has
# git and make, and nothing else. Needs root, mmdebstrap and about 6 GB of disk. Takes the committed HEAD, not the working tree.
#
#   tools/fresh_check.sh [setup|serve|test|all]
set -euo pipefail
what=${1:-all}
[ "$(id -u)" -eq 0 ] || { echo "fresh_check needs root (chroot)" >&2; exit 1; }
command -v mmdebstrap >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends mmdebstrap >/dev/null; }

top=$(git rev-parse --show-toplevel)
root=$(mktemp -d "${TMPDIR:-/tmp}/glm53-fresh.XXXXXX")
mounts=()
cleanup() {
  [ -e "$root/root/glm53-offload/serve.pid" ] && kill -KILL -- "-$(cat "$root/root/glm53-offload/serve.pid")" 2>/dev/null || true
  for ((i = ${#mounts[@]} - 1; i >= 0; i--)); do umount -l "${mounts[i]}" || true; done
  case "$root" in */glm53-fresh.*) rm -rf --one-file-system "$root" ;; esac
}
trap cleanup EXIT
trap 'exit 143' INT TERM HUP  # without it the shell would go and leave the mounts
bind() { # bind SOURCE [TARGET]
  mkdir -p "$root${2:-$1}" && mount --bind "$1" "$root${2:-$1}" && mounts+=("$root${2:-$1}")
}

echo "== an empty Debian 12"
mmdebstrap --quiet --variant=minbase --mode=root --include=git,make,ca-certificates bookworm "$root"
mount -t proc proc "$root/proc" && mounts+=("$root/proc")
mount -t sysfs sys "$root/sys" && mounts+=("$root/sys")
bind /dev
[ -d /dev/pts ] && bind /dev/pts
mount -t tmpfs -o size=2g tmpfs "$root/dev/shm" && mounts+=("$root/dev/shm")
cp /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null || true
echo "127.0.0.1 localhost" > "$root/etc/hosts"  # the installer writes it, mmdebstrap does not

# How this machine reaches its package indexes is the machine's business, not the product's: carry its settings of pip, npm and
# certificates over, with every local folder that they name.
cp -r /etc/ssl/certs "$root/etc/ssl/" 2>/dev/null || true
for f in /etc/pip.conf /etc/xdg/pip; do [ -e "$f" ] && mkdir -p "$root$(dirname "$f")" && cp -r "$f" "$root$f"; done
python3 -m pip config list 2>/dev/null | grep -oE "(file://)?/[A-Za-z0-9_./-]+" | sed 's#^file://##' | sort -u | while read -r folder; do
  [ -d "$folder" ] && echo "$folder" || true
done | awk '{split($0,p,"/"); print "/" p[2] "/" p[3]}' | sort -u > "$root/.folders"
while read -r folder; do [ -d "$folder" ] && [ "$folder" != "/etc/ssl" ] && bind "$folder"; done < "$root/.folders"

git clone -q "$top" "$root/root/glm53-offload"
in_root() { env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb $(env | grep -E '^(PIP_|npm_config_|NODE_EXTRA_CA_CERTS=|https?_proxy=|HTTPS?_PROXY=|no_proxy=)' || true) chroot "$root" bash -c "$1"; }

if [ "$what" = setup ]; then
  in_root "cd /root/glm53-offload && make setup-dev"
  echo "== make setup-dev: OK"
  exit 0
fi
if [ "$what" != test ]; then
  echo "== make serve"
  in_root "cd /root/glm53-offload && (setsid make serve > serve.log 2>&1 & echo \$! > serve.pid)"
  for _ in $(seq 1 600); do
    in_root "python3 -c \"import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=2)\"" 2>/dev/null && up=1 && break
    sleep 2
  done
  in_root "tail -n 25 /root/glm53-offload/serve.log"
  [ "${up:-0}" = 1 ] || { echo "FAILED: make serve did not become ready" >&2; exit 1; }
  in_root "cd /root/glm53-offload && .venv/bin/python -m bench.first_request http://127.0.0.1:30000"
  # Its own process group: the chroot shares the machine's processes, and others may serve there.
  in_root "kill -TERM -- -\$(cat /root/glm53-offload/serve.pid)"
  for _ in $(seq 1 60); do in_root "ls /dev/shm | grep -q glm53" || { gone=1; break; }; sleep 1; done
  [ "${gone:-0}" = 1 ] || { echo "FAILED: shared memory was left behind" >&2; exit 1; }
  rm -f "$root/root/glm53-offload/serve.pid"
  echo "== make serve: OK"
fi
if [ "$what" != serve ]; then
  echo "== make test"
  in_root "cd /root/glm53-offload && make test"
  echo "== make test: OK"
fi
