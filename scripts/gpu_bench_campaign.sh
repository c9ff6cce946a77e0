#!/usr/bin/env bash
# The benchmark specs of one large GPU, one after another: python3 must find poros and its needs.
# Usage: gpu_bench_campaign.sh WORK OUT SPEC...      SPEC: a name in configs/bench without .yaml
# WORK keeps what has been measured, so the same command goes on where it was stopped. OUT gets each spec's rows, as
# far as they are.
set -u
work=$1 out=$2
shift 2
mkdir -p "$work" "$out"
poros() { python3 -c 'from poros.cli import main; main()' "$@"; }
keep() { # keep SPEC: its rows so far, verified
  [ -e "$work/$1/rows.jsonl" ] || return 0
  cp "$work/$1/rows.jsonl" "$out/$1.jsonl"
  poros bench verify "$out/$1.jsonl"
}
for spec in "$@"; do
  trap 'keep "$spec"; exit 124' TERM
  poros bench matrix "configs/bench/$spec.yaml" -o "$work/$spec" &
  wait $!
  keep "$spec"
done
