#!/usr/bin/env bash
# From a configuration to a checked draft directory, on one TPU host or one GPU host.
#
#   tpu_scripts/train.sh CONFIG [section.key=value ...] [--dry-run] [--device tpu|cuda12|cuda13|cpu]
#
# --dry-run prints the commands and does nothing. The device is detected unless given. PYTHON names the
# interpreter for .venv. CONFIG is written in blocks, as those in configs/ are.
set -euo pipefail

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0"; }
fail() { echo "train.sh: $1" >&2; exit 2; }

config="" dry="" device="" overrides=()
while (($#)); do
  case $1 in
    --dry-run) dry=1 ;;
    --device) device=${2:-}; shift; [[ -n $device ]] || fail "--device wants tpu, cuda12, cuda13 or cpu" ;;
    --device=*) device=${1#*=} ;;
    -h | --help) usage; exit ;;
    -*) fail "unknown option $1; known: --dry-run, --device" ;;
    *=*) overrides+=("$1") ;;
    *) [[ -z $config ]] || fail "one configuration is wanted, found $config and $1"; config=$1 ;;
  esac
  shift
done
[[ -n $config ]] || { usage >&2; exit 2; }
[[ -f $config ]] || fail "$config: no such configuration file"
config=$(realpath "$config")
cd "$(dirname "$(realpath "$0")")/.."

detect() {
  if compgen -G "/dev/accel*" >/dev/null || compgen -G "/dev/vfio/[0-9]*" >/dev/null; then
    echo tpu
  elif command -v nvidia-smi >/dev/null; then
    local cuda
    cuda=$(nvidia-smi | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
    if ((${cuda:-12} >= 13)); then echo cuda13; else echo cuda12; fi
  else
    echo cpu
  fi
}
device=${device:-$(detect)}
case $device in
  tpu | cuda12 | cuda13) extras=$device ;;
  cpu) extras="" ;;
  *) fail "--device $device: tpu, cuda12, cuda13 or cpu is wanted" ;;
esac

# setting SECTION KEY DEFAULT: the last override, else the file's value, else the default.
setting() {
  local found item
  found=$(awk -v section="$1:" -v key="$2:" '
    /^[^ #]/ { inside = ($1 == section) }
    inside && $1 == key { sub(/^[^:]*:[ \t]*/, ""); sub(/[ \t]+#.*$/, ""); gsub(/^["\047]|["\047]$/, ""); print; exit }
  ' "$config")
  for item in "${overrides[@]}"; do
    [[ $item == "$1.$2="* ]] && found=${item#*=}
  done
  echo "${found:-$3}"
}
run=$(setting train run "")
mode=$(setting train mode offline)
[[ -n $run ]] || fail "$config: train.run is missing"

run() {
  printf '%q ' "$@" | sed 's/ $/\n/'
  [[ -n $dry ]] || "$@"
}

run export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/eagle3-jax/compiled}"
case $device in
  cuda*) run export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}" ;;
  cpu) run export JAX_PLATFORMS=cpu ;;
esac
run make venv EXTRAS="$extras" PYTHON="${PYTHON:-python3}"
run .venv/bin/eagle3 prepare "$config" "${overrides[@]}"
[[ $mode == online ]] || run .venv/bin/eagle3 capture "$config" "${overrides[@]}"
run .venv/bin/eagle3 train "$config" "${overrides[@]}"
run .venv/bin/eagle3 evaluate "$run"
run .venv/bin/bridge convert "$run" "$run/draft"
run .venv/bin/bridge check "$run/draft"
