#!/bin/sh
# trees.sh FOLDER: what each image has in /app, from the tree in the current folder.
set -eu
out=$1

tree() { # tree IMAGE PATH...
  image=$1
  shift
  for path in "$@"; do
    mkdir -p "$out/$image/$(dirname "$path")"
    cp -r "$path" "$out/$image/$path"
  done
  python3 -m compileall -q --invalidation-mode unchecked-hash -s "$out/$image" -p /app "$out/$image"
  # Readable for every user, writable for none.
  chmod -R a+rX,a-w "$out/$image"
}

tree gateway services/__init__.py services/common services/gateway
tree gpu-worker services/__init__.py services/common services/gpu_worker kernels models
tree cpu-expert services/__init__.py services/common services/cpu_expert kernels
tree cli services kernels models cli
