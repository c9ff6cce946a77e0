#!/usr/bin/env bash
# Parity at real shapes on one large GPU: python3 must find poros and its needs. Exit status 1 unless all of it is PASS.
# Usage: gpu_parity_campaign.sh OUT [PART...]     PART: qwen, gemma, staying; the first two by default
# PARITY_OPTIONS is added to every check; --no-replay gives the rows of kernels launched one by one.
# Runs are bound by kernel launches from Python, so several share the GPU, as far as its memory goes.
# A row's process_bytes is what the whole GPU holds where the driver cannot tell the processes apart.
set -u
out=$1
shift
parts=" ${*:-qwen gemma} "
mkdir -p "$out"
parity() { # parity NAME MODEL OPTION...
  local name=$1 model=$2; shift 2
  python3 -c 'from poros.cli import main; main()' parity "$model" --device cuda --seq-len 512 "$@" \
    ${PARITY_OPTIONS:-} --rows "$out/parity.jsonl" > "$out/$name.log" 2>&1
  local status=$?
  echo "$name: status $status, $(tail -n 1 "$out/$name.log")"
  [ $status = 0 ] || : > "$out/.failed"
}
rm -f "$out/.failed"
both=(--path strict --path math)
if [[ $parts == *" qwen "* ]]; then
  parity qwen2.5-7b-strict qwen2.5-7b --steps 200 --block-size 4 --slots 2 --control-steps 20 &
  parity qwen2.5-7b-math qwen2.5-7b --path math --steps 50 --accumulate 2 --block-size 2 --slots 3 --control-steps 10 &
  parity qwen2.5-32b qwen2.5-32b "${both[@]}" --steps 20 --block-size 4 --slots 2 --poison --control-steps 5 &
  first=$!
  parity qwen3-32b qwen3-32b "${both[@]}" --steps 20 --block-size 1 --slots 3 --control-steps 5 &
  wait "$first" $!
  parity qwen2.5-72b qwen2.5-72b "${both[@]}" --steps 5 --block-size 4 --slots 2
  wait
fi
if [[ $parts == *" gemma "* ]]; then
  parity gemma-3-27b-it gemma-3-27b-it "${both[@]}" --steps 10 --block-size 4 --slots 2 &
  parity gemma-4-31b gemma-4-31b "${both[@]}" --steps 10 --block-size 4 --slots 2
  wait
fi
if [[ $parts == *" staying "* ]]; then # blocks that stay, half of them and all
  parity qwen2.5-7b-half qwen2.5-7b "${both[@]}" --steps 20 --resident-blocks 14 --control-steps 5 &
  parity qwen2.5-7b-all qwen2.5-7b "${both[@]}" --steps 20 --resident-blocks 28 --control-steps 5 &
  parity qwen2.5-32b-half qwen2.5-32b "${both[@]}" --steps 20 --resident-blocks 32 --control-steps 5
  wait
fi
[ ! -e "$out/.failed" ]
