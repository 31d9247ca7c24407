#!/usr/bin/env bash
# Serve a draft with the real SGLang and compare what it accepts with what was predicted.
#
#   tpu_scripts/validate_sglang_gpu.sh DIR TARGET [--device cuda|cpu] [--dry-run] [bridge serve's options]
#
# DIR comes from `bridge convert` after `eagle3 evaluate`. Prints predicted beside served; exit code 1 where served
# lies outside the predicted interval. --dry-run prints the commands and does nothing.
set -euo pipefail

VERSION=0.5.23
usage() { sed -n '2,7s/^# \{0,1\}//p' "$0"; }
fail() { echo "validate_sglang_gpu.sh: $1" >&2; exit 2; }

dry="" device=cuda paths=() options=()
while (($#)); do
  case $1 in
    --dry-run) dry=1 ;;
    --device) device=${2:-}; shift ;;
    --device=*) device=${1#*=} ;;
    -h | --help) usage; exit ;;
    -*) options+=("$1"); [[ ${2:-} == -* || $# -eq 1 ]] || { options+=("$2"); shift; } ;;
    *) paths+=("$1") ;;
  esac
  shift
done
[[ $device == cuda || $device == cpu ]] || fail "--device ${device:-}: cuda or cpu is wanted"
((${#paths[@]} == 2)) || { usage >&2; exit 2; }
draft=$(realpath "${paths[0]}")
[[ -d $draft ]] || fail "${paths[0]}: no such draft directory"
target=${paths[1]}
[[ ! -e $target ]] || target=$(realpath "$target")
cd "$(dirname "$(realpath "$0")")/.."

run() {
  printf '%q ' "$@" | sed 's/ $/\n/'
  [[ -n $dry ]] || "$@"
}

run make venv PYTHON="${PYTHON:-python3}"
if [[ $device == cpu ]]; then
  run make engines PYTHON="${PYTHON:-python3}"
else
  python=.venv-sglang-cuda/bin/python
  [[ -x $python ]] || run "${PYTHON:-python3}" -m venv .venv-sglang-cuda
  run $python -m pip install --quiet "sglang==$VERSION"
  options+=(--python "$python")
fi
run .venv/bin/bridge serve "$draft" --target "$target" --device "$device" --strict "${options[@]}"
