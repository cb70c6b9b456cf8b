#!/usr/bin/env bash
# Runs one command on every worker of a Cloud TPU slice, at the same time.
#
#   scripts/tpu_slice.sh NAME ZONE COMMAND...
#
#   scripts/tpu_slice.sh my-slice us-central2-b pip install specjax 'jax[tpu]'
#   scripts/tpu_slice.sh my-slice us-central2-b \
#     python3 -m specjax.run --multi_host --mesh_data 2 --mesh_model 8 \
#     --model gs://my-bucket/target --draft_model gs://my-bucket/draft \
#     --dtype bfloat16 --input sources.txt --output results.jsonl
#
# With --multi_host the workers form one program; worker 0 prints and writes. Files
# must be on all workers. TPU_PROJECT names a project other than gcloud's default;
# TPU_DIRECTORY is where the command runs, the home directory by default.
set -euo pipefail

if (($# < 3)); then
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
name=$1 zone=$2
shift 2
if ! command -v gcloud > /dev/null; then
  echo 'tpu_slice: gcloud is not installed; see https://cloud.google.com/sdk' >&2
  exit 2
fi

# Each word as it was given here, whatever characters it has.
command=$(printf '%q ' "$@")
if [[ -n ${TPU_DIRECTORY:-} ]]; then
  command="cd $(printf '%q' "$TPU_DIRECTORY") && $command"
fi
exec gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all \
  ${TPU_PROJECT:+--project="$TPU_PROJECT"} --command="$command"
