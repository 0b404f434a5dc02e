#!/usr/bin/env bash
# One session on a rented GPU machine, in parts of nine minutes: bash bench/gpu_session.sh PART OUT [--dry-run]
#
#   1      the slice's files, exact on the slice, fast on the slice, a worker's second start
#   2      stock's CPU split and stock with every expert in VRAM, the comparisons of bits, fidelity of fast, hidden states, the tests
#   clean  takes everything out of memory
#
# Each part first does its own list, of each bench what every session must have, the most valuable first; then whatever else is missing, as
# long as time is left; and prints one table of all figures last. Each works alone: what it needs of an earlier part it makes. What one
# command has measured the next ones keep until the machine is started anew.
# OUT gets the result files while they grow. Exit: 0 when nothing failed, 1 when a step did, 2 when the machine lacks something.
#
#   GPU_SESSION_SECONDS  of a part (540)                    GPU_SESSION_LAYERS  MoE layers of the slice (12)
#   GPU_SESSION_STATE    what is kept (/dev/shm/glm53-session)  GPU_SESSION_STEPS   decode steps of a row (150), and as many before
#   GPU_SESSION_ANY_STOCK=1  go on when stock is slower than it is known to be
#   GPU_SESSION_STOCK_STEPS  of stock's rows (60)           GPU_SESSION_FIDELITY=FILE  an earlier gpu_fast.json: its bits are quoted
#   PYTHON               the interpreter (python3)
set -u

usage() {
  sed -n '2,7p' "${BASH_SOURCE[0]}" | cut -c3-
  exit 2
}

[ $# -ge 2 ] && [ $# -le 3 ] || usage
PART=$1
OUT=$(realpath -m -- "$2")
DRY=()
if [ $# -eq 3 ]; then
  [ "$3" = --dry-run ] || usage
  DRY=(--dry-run)
fi
PYTHON=${PYTHON:-python3}
LIMIT=${GPU_SESSION_SECONDS:-540}
STATE=${GPU_SESSION_STATE:-/dev/shm/glm53-session${DRY[0]:-}}  # a dry run's rows are no real run's
LAYERS=${GPU_SESSION_LAYERS:-12}
STEPS=${GPU_SESSION_STEPS:-150}
TRIES=3
TABLE_S=20  # kept for the table
CLOSE_S=15  # of a bench's limit, kept for what it does after its last row
export PYTHONUNBUFFERED=1
case $PYTHON in */*) PYTHON=$(realpath -ms -- "$PYTHON") ;; esac
STATE=$(realpath -m -- "$STATE")
FIDELITY=${GPU_SESSION_FIDELITY:+$(realpath -m -- "$GPU_SESSION_FIDELITY")}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

for number in "$LIMIT" "$LAYERS" "$STEPS"; do
  case $number in '' | *[!0-9]*) echo "GPU_SESSION_SECONDS, GPU_SESSION_LAYERS and GPU_SESSION_STEPS are whole numbers, not '$number'" >&2; exit 2 ;; esac
done

if [ -n "$FIDELITY" ] && [ ! -f "$FIDELITY" ]; then
  echo "GPU_SESSION_FIDELITY: there is no file $FIDELITY" >&2
  exit 2
fi

BOOT=$(cat /proc/sys/kernel/random/boot_id)
if [ -e "$STATE/boot" ] && [ "$(cat "$STATE/boot")" != "$BOOT" ]; then
  rm -rf "$STATE"
fi
mkdir -p "$STATE" "$OUT" || exit 2
echo "$BOOT" > "$STATE/boot"

STOCK_STEPS=${GPU_SESSION_STOCK_STEPS:-60}
[ "$STOCK_STEPS" -lt "$STEPS" ] || STOCK_STEPS=$STEPS
SLICE=(--layers "$LAYERS" --warm "$STEPS" --steps "$STEPS" --state "$STATE/gpu_exact_slice.rows" --out "$STATE/gpu_exact_slice.json" "${DRY[@]}")
STOCK=(--warm "$STOCK_STEPS" --steps "$STOCK_STEPS") # of words that are given twice the last one counts
[ -z "${GPU_SESSION_ANY_STOCK:-}" ] || STOCK+=(--any-stock)
FAST=(--layers "$LAYERS" --warm "$STEPS" --steps "$STEPS" --state "$STATE/gpu_fast.rows" --out "$STATE/gpu_fast.json"
  --slice "$STATE/gpu_exact_slice.json" --int-kernel "$STATE/gpu_int_kernel.json" "${DRY[@]}")
[ -z "$FIDELITY" ] || FAST+=(--fidelity-from "$FIDELITY")
# The settings of other plugins in pyproject.toml are no errors where those plugins are not installed.
PYTEST=(-m pytest -m gpu -q -o addopts= -W ignore::pytest.PytestConfigWarning -p no:cacheprovider)
[ ${#DRY[@]} -eq 0 ] || PYTEST+=(--collect-only)

# The command of a step, in COMMAND; $2: seconds that it may take.
command_of() {
  local seconds=$(($2 - CLOSE_S))
  case $1 in
    check) COMMAND=(-m bench.gpu_check --layers "$LAYERS" "${DRY[@]}") ;;
    prepare) COMMAND=(-m bench.gpu_exact_slice prepare "${SLICE[@]}") ;;
    ours) COMMAND=(-m bench.gpu_exact_slice ours --first --seconds "$seconds" "${SLICE[@]}") ;;
    start) COMMAND=(-m bench.gpu_exact_slice start --seconds "$seconds" "${SLICE[@]}") ;;
    ours_rest) COMMAND=(-m bench.gpu_exact_slice ours --seconds "$seconds" "${SLICE[@]}") ;;
    stock) COMMAND=(-m bench.gpu_exact_slice stock --first --seconds "$seconds" "${SLICE[@]}" "${STOCK[@]}") ;;
    stock_resident) COMMAND=(-m bench.gpu_exact_slice stock_resident --first --seconds "$seconds" "${SLICE[@]}" "${STOCK[@]}") ;;
    fast) COMMAND=(-m bench.gpu_fast --only speed --first --seconds "$seconds" "${FAST[@]}") ;;
    fast_rest) COMMAND=(-m bench.gpu_fast --only speed --seconds "$seconds" "${FAST[@]}") ;;
    hints) COMMAND=(-m bench.gpu_fast --only hints --seconds "$seconds" "${FAST[@]}") ;;
    hidden) COMMAND=(-m bench.gpu_fast --only hidden --seconds "$seconds" "${FAST[@]}") ;;
    fidelity) COMMAND=(-m bench.gpu_fast --only fidelity --seconds "$seconds" "${FAST[@]}") ;;
    exact) COMMAND=(-m bench.gpu_exact --first-config --seconds "$seconds" --state "$STATE/gpu_exact.rows" --out "$STATE/gpu_exact.json"
      --slice "$STATE/gpu_exact_slice.json" "${DRY[@]}") ;;
    int_kernel) COMMAND=(-m bench.gpu_int_kernel --seconds 12 --out "$STATE/gpu_int_kernel.json" "${DRY[@]}") ;;
    kept) COMMAND=(-m bench.gpu_kept --out "$STATE/gpu_kept.json")
      [ ${#DRY[@]} -eq 0 ] || COMMAND=(-m bench.gpu_kept --help) ;;
    tests_fast) COMMAND=("${PYTEST[@]}" tests/gpu/test_{waits,fast,arena_check,round_trip,gather,joined,broken_passes}.py
      -k "not shipped_model and not hints") ;;
    tests_hints) COMMAND=("${PYTEST[@]}" tests/gpu/test_early_router.py tests/gpu/test_waits.py -k hints) ;;
    tests_kernel) COMMAND=("${PYTEST[@]}" tests/gpu/test_int_expert.py tests/gpu/test_int_expert_tiles.py) ;;
  esac
}

say() { echo "$*" | tee -a "$STATE/session.log"; }

# At most eight files come back from a machine: the table is printed, and figures.json has all of it.
mirror() { cp "$STATE"/*.json "$STATE/session.log" "$OUT"/ 2> /dev/null; }

declare -i FAILED=0
declare -A BROKEN=() # how often a step failed in this part
LEFT_OUT=()

# How often a part begins a step that fails. A row that broke the device takes the process with it: the next one begins behind it.
tries_of() {
  case $1 in
    ours* | fast*) echo "$TRIES" ;;
    *) echo 1 ;;
  esac
}

# step NAME LIMIT LEAST: runs it when it is not done and at least LEAST seconds are left; it is killed after LIMIT.
step() {
  local name=$1 give=$(($2 < LIMIT - TABLE_S - SECONDS ? $2 : LIMIT - TABLE_S - SECONDS)) began=$SECONDS code
  if [ -e "$STATE/done.$name" ] || [ "${BROKEN[$name]:-0}" -ge "$(tries_of "$name")" ]; then
    return 0
  fi
  if [ "$give" -lt "$3" ]; then
    LEFT_OUT+=("$name")
    say "$name: left out, it needs $3 s and $((give > 0 ? give : 0)) s are left"
    return 0
  fi
  command_of "$name" "$give"
  local log="$STATE/session.log" printed="$STATE/printed" from
  echo "== $name: $PYTHON ${COMMAND[*]}" >> "$log"
  from=$(stat -c %s "$log")
  # An interrupt first: what the command holds in shared memory goes back. No pipe: a process that outlives the command would hold it open.
  timeout -s INT -k 10 "$give" "$PYTHON" "${COMMAND[@]}" < /dev/null >> "$log" 2>&1
  code=$?
  tail -c "+$((from + 1))" "$log" > "$printed"
  case $code in
    0) if grep '"error":' "$printed" | grep -qv 'the time was over'; then
        FAILED+=1
        BROKEN[$name]=$TRIES
        say "$name: some rows failed, $((SECONDS - began)) s; the next part tries them again"
      elif grep -qE '^no time for|the time was over' "$printed"; then
        say "$name: some of it, $((SECONDS - began)) s; the rest is for a later command"
      else
        touch "$STATE/done.$name"
        say "$name: done, $((SECONDS - began)) s$(sed -n '/^[0-9].* in [0-9.]*s.*$/s/^/; /p' "$printed")"
      fi ;;
    124 | 137) say "$name: cut off after $((SECONDS - began)) s; its rows so far are kept" ;;
    *) FAILED+=1
      BROKEN[$name]=$((${BROKEN[$name]:-0} + 1))
      say "$name: failed with $code after $((SECONDS - began)) s; the end of what it printed:"
      tail -n 12 "$printed" | cut -c1-300 ;;
  esac
  mirror
  return "$code"
}

# fill NAME LIMIT LEAST ...: what no part of its own has finished.
fill() {
  while [ $# -ge 3 ]; do
    if [ $((LIMIT - TABLE_S - SECONDS)) -ge "$3" ]; then
      step "$1" "$2" "$3"
    fi
    shift 3
  done
}

clean() {
  "$PYTHON" -m bench.gpu_exact_slice clean --state "$STATE/gpu_exact_slice.rows"
  [ ! -e "$STATE/boot" ] || rm -rf "$STATE"
}

case $PART in
  clean)
    clean
    exit ;;
  1 | 2) ;;
  *) usage ;;
esac

say "part $PART, $LIMIT s, boot $BOOT"
# Rows are of use although the command is cut off from outside: they are copied while they grow.
(while sleep 10; do mirror; done) > /dev/null 2>&1 &
MIRROR=$!
trap 'kill "$MIRROR" 2> /dev/null; mirror' EXIT

if ! step check 90 20; then
  cat "$STATE/printed"
  exit 2
fi
case $PART in
  1)
    step prepare 90 25
    step ours 300 60
    step fast 330 60
    step start 230 65 ;;
  2)
    step prepare 90 25
    step stock 250 150
    step stock_resident 110 70
    step exact 150 50
    step fidelity 150 45
    step hidden 75 40
    step tests_fast 150 75
    step tests_kernel 60 30
    step kept 90 40 ;;
esac
# The first two again where a row broke the device; then part 2's list, and what no session must have.
fill prepare 90 25 ours "$LIMIT" 60 ours "$LIMIT" 60 fast 400 60 fast 400 60 start 230 65 stock 300 160 stock_resident 120 75 exact 200 50 \
  fidelity 200 45 hidden 75 40 tests_fast 150 75 tests_kernel 60 30 kept 90 40 hints 150 60 tests_hints 110 50 int_kernel 45 30 ours_rest "$LIMIT" 60 \
  fast_rest "$LIMIT" 60

"$PYTHON" -m bench.gpu_figures "$STATE" || FAILED+=1
for name in check prepare ours fast start stock stock_resident exact fidelity hidden tests_fast tests_kernel kept hints tests_hints int_kernel \
  ours_rest fast_rest; do
  [ -e "$STATE/done.$name" ] || echo "not finished: $name"
done
[ ${#LEFT_OUT[@]} -eq 0 ] || echo "left out in this part: ${LEFT_OUT[*]}"
echo "part $PART: $SECONDS s, $FAILED steps failed"
exit $((FAILED > 0))
