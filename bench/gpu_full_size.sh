#!/usr/bin/env bash
# All 42 layers on a machine with 128 GiB of RAM or more and one GPU: bash bench/gpu_full_size.sh OUT [--dry-run | clean]
#
# Checks the machine, makes room in /dev/shm, writes the files without experts (6 GB), fills the arena with random experts (107 GiB), and
# measures `exact` and `fast` as a card of 24 GB serves them, in one process. A second command goes on where the first was cut off.
# OUT gets gpu_full_size.json while it grows, full_size.log, and triton_pins.json with GPU_FULL_SIZE_TUNE=1. `clean` takes everything out of
# memory. Exit: 0 when nothing failed, 1 when a step did, 2 when the machine lacks something.
#
#   GPU_SESSION_SECONDS  of the command (560)               GPU_SESSION_LAYERS   layers with experts (42)
#   GPU_SESSION_STATE    its rows (/dev/shm/glm53-full-size) GPU_SESSION_STEPS    decode steps of a row (100), and as many before
#   GPU_FULL_SIZE_RAM_GIB  what the machine has (256), whatever the system says before it is used
#   GPU_FULL_SIZE_SHM_GIB  what /dev/shm must be (132)      GPU_FULL_SIZE_THREADS  of cpu_expert (14)
#   GPU_FULL_SIZE_GROW_GIB what is touched beforehand (125) GPU_FULL_SIZE_FOLDER of the files without experts (in /dev/shm)
#   GPU_FULL_SIZE_TUNE=1   let Triton time its configurations, for shipped pins
#   PYTHON               the interpreter (python3)
#
# With 128 GiB: GPU_FULL_SIZE_RAM_GIB=128 GPU_FULL_SIZE_GROW_GIB=114 GPU_FULL_SIZE_FOLDER=<on a disk> GPU_FULL_SIZE_SHM_GIB=128.
set -u

usage() {
  sed -n '2,2p' "${BASH_SOURCE[0]}" | cut -c3-
  exit 2
}

[ $# -ge 1 ] && [ $# -le 2 ] || usage
OUT=$(realpath -m -- "$1")
DRY=()
case ${2:-} in
  '' | clean) ;;
  --dry-run) DRY=(--dry-run) ;;
  *) usage ;;
esac
PYTHON=${PYTHON:-python3}
LIMIT=${GPU_SESSION_SECONDS:-560}
LAYERS=${GPU_SESSION_LAYERS:-42}
STEPS=${GPU_SESSION_STEPS:-100}
STATE=${GPU_SESSION_STATE:-/dev/shm/glm53-full-size${DRY[0]:-}} # a dry run's rows are no real run's
RAM_GIB=${GPU_FULL_SIZE_RAM_GIB:-256}
SHM_GIB=${GPU_FULL_SIZE_SHM_GIB:-132}
THREADS=${GPU_FULL_SIZE_THREADS:-14}
GROW_GIB=${GPU_FULL_SIZE_GROW_GIB:-125}
FOLDER=${GPU_FULL_SIZE_FOLDER:+$(realpath -m -- "$GPU_FULL_SIZE_FOLDER")}
CLOSE_S=15 # of the limit, kept for what a command does after its last row
# One GPU, and the driver's first one: its memory is what is watched.
export PYTHONUNBUFFERED=1 CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
case $PYTHON in */*) PYTHON=$(realpath -ms -- "$PYTHON") ;; esac
STATE=$(realpath -m -- "$STATE")
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

for number in "$LIMIT" "$LAYERS" "$STEPS" "$RAM_GIB" "$SHM_GIB" "$THREADS" "$GROW_GIB"; do
  case $number in '' | *[!0-9]*) echo "seconds, layers, steps, threads and GiB are whole numbers, not '$number'" >&2; exit 2 ;; esac
done

mkdir -p "$STATE" "$OUT" || exit 2
LOG=$OUT/full_size.log
WORDS=(--layers "$LAYERS" --warm "$STEPS" --steps "$STEPS" --threads "$THREADS" --state "$STATE/rows.json" --out "$OUT/gpu_full_size.json" "${DRY[@]}")
[ -z "${GPU_FULL_SIZE_TUNE:-}" ] || WORDS+=(--tune)
[ -z "$FOLDER" ] || WORDS+=(--folder "$FOLDER")

if [ "${2:-}" = clean ]; then
  "$PYTHON" -m bench.gpu_full_size clean "${WORDS[@]}"
  rm -rf "$STATE"
  exit
fi

say() { echo "$*" | tee -a "$LOG"; }

# step NAME LIMIT COMMAND...: what it prints goes to the log, the end of it is shown when it fails.
step() {
  local name=$1 give=$(($2 < LIMIT - SECONDS ? $2 : LIMIT - SECONDS)) began=$SECONDS code from
  shift 2
  if [ "$give" -lt 5 ]; then
    say "$name: left out, $give s are left"
    return 1
  fi
  echo "== $name: $PYTHON $*" >> "$LOG"
  from=$(stat -c %s "$LOG")
  # An interrupt first: what the command holds in shared memory goes back. No pipe: a process that outlives the command would hold it open.
  timeout -s INT -k 10 "$give" "$PYTHON" "$@" < /dev/null >> "$LOG" 2>&1
  code=$?
  if [ $code -ne 0 ]; then
    tail -c "+$((from + 1))" "$LOG" | tail -n 60 | cut -c1-300
  elif tail -c "+$((from + 1))" "$LOG" | grep '"error":'; then
    code=1
  fi
  say "$name: $([ $code -eq 0 ] && echo done || echo "failed with $code"), $((SECONDS - began)) s"
  return $code
}

# The file system of shared memory often has half of the memory that was there when it was mounted.
make_room() {
  local size
  size=$(($(df -B1 --output=size /dev/shm | tail -n 1) >> 30))
  [ "$size" -lt "$SHM_GIB" ] || return 0
  if [ "$(id -u)" -eq 0 ] && mount -o "remount,size=${SHM_GIB}g" /dev/shm; then
    say "/dev/shm: $size GiB are now $SHM_GIB"
  else
    say "/dev/shm has $size GiB and cannot be made larger: mount -o remount,size=${SHM_GIB}g /dev/shm as root"
  fi
}

[ ${#DRY[@]} -gt 0 ] || make_room
step check 90 -m bench.gpu_check --layers "$LAYERS" --arena-only --ram-gib "$RAM_GIB" "${DRY[@]}" || exit 2
FAILED=0
step grow 120 -m bench.gpu_full_size grow --grow-gib "$GROW_GIB" "${WORDS[@]}" || FAILED=1 # the others may find the memory all the same
step prepare 120 -m bench.gpu_full_size prepare "${WORDS[@]}" || exit 1
step run 3600 -m bench.gpu_full_size run --seconds $((LIMIT - SECONDS - CLOSE_S)) "${WORDS[@]}" || FAILED=1
"$PYTHON" -c 'import json, sys; [print(f"{key:28} {value}") for key, value in json.load(open(sys.argv[1]))["summary"].items()]' \
  "$OUT/gpu_full_size.json" || FAILED=1
echo "full size: $SECONDS s"
exit $FAILED
