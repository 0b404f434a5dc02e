#!/bin/sh
# trees.sh FOLDER IMAGE...: what each image has in /app, from the tree in the current folder.
set -eu
out=$1
shift
# The preflight, and what it asks with.
own="services/__init__.py cli/__init__.py cli/doctor cli/probe.py cli/settings.py"

for image; do
  case $image in
    gateway) paths="$own services/common services/gateway" ;;
    gpu-worker) paths="$own services/common services/gpu_worker kernels models" ;;
    cpu-expert) paths="$own services/common services/cpu_expert kernels" ;;
    cli) paths="services kernels models cli" ;;
    *) echo "no image is called $image" >&2; exit 1 ;;
  esac
  for path in $paths; do
    mkdir -p "$out/$image/$(dirname "$path")"
    cp -r "$path" "$out/$image/$path"
  done
  python3 -m compileall -q --invalidation-mode unchecked-hash -s "$out/$image" -p /app "$out/$image"
  # Readable for every user, writable for none.
  chmod -R a+rX,a-w "$out/$image"
done
