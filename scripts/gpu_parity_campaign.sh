#!/usr/bin/env bash
# Parity at real shapes on one large GPU: python3 must find poros and its needs. Usage: gpu_parity_campaign.sh OUT
# Runs are bound by kernel launches from Python, so several share the GPU; the 72B shape has it for itself.
set -u
out=$1
parity() { # parity NAME MODEL SETTING=VALUE...
  local name=$1 model=$2; shift 2
  env "${@/#/POROS_GPU_TEST_}" POROS_GPU_TEST_MODEL="$model" POROS_GPU_TEST_ROWS="$out/parity.jsonl" \
    python3 -m pytest -m gpu tests/test_gpu_parity.py -q -o filterwarnings=default -W ignore --no-header \
    > "$out/$name.log" 2>&1
  echo "$name: $(tail -n 1 "$out/$name.log")"
}
{
  parity qwen2.5-32b qwen2.5-32b STEPS=20 BLOCK_SIZE=4 SLOTS=2 POISON=1 CONTROL_STEPS=5
  parity qwen3-32b qwen3-32b STEPS=20 BLOCK_SIZE=1 SLOTS=3 CONTROL_STEPS=5
} &
parity qwen2.5-7b-strict qwen2.5-7b PATHS=strict STEPS=200 BLOCK_SIZE=4 SLOTS=2 CONTROL_STEPS=20 &
parity qwen2.5-7b-math qwen2.5-7b PATHS=math STEPS=50 ACCUMULATION=2 BLOCK_SIZE=2 SLOTS=3 CONTROL_STEPS=10 &
wait
parity qwen2.5-72b qwen2.5-72b STEPS=5 BLOCK_SIZE=4 SLOTS=2
