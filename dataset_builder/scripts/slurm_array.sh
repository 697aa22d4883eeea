#!/usr/bin/env bash
# One task of a Slurm job array: a campaign on one GPU, in a folder of its own, with the task's number as its seed.
# Submitting, going on and merging: docs/how-to/measure-slurm.md.  Every setting below can be given on sbatch's command line instead.
#SBATCH --job-name=gpu-memory
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=12
#SBATCH --mem=64G
#SBATCH --time=00:15:00
#SBATCH --output=slurm-%A_%a.log
set -euo pipefail

: "${SLURM_ARRAY_TASK_ID:?this is a task of a job array: submit it with  sbatch --array=0-3}"
: "${RECIPE:?name the recipe, such as RECIPE=mlp}"
: "${OUT:?name the folder for all tasks, such as OUT=campaigns/mlp}"

exec "${PYTHON:-python3}" -m dataset_builder campaign "$RECIPE" \
  --out "$OUT/$SLURM_ARRAY_TASK_ID" \
  --seed "$SLURM_ARRAY_TASK_ID" \
  --workers "${WORKERS:-${SLURM_CPUS_PER_TASK:-12}}" \
  --time-budget "${TIME_BUDGET:-540}"
