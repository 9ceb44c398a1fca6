#!/bin/bash
#SBATCH --job-name=demo-abcdef
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=job.log

# shellcheck disable=SC1003,SC2016  # values are quoted so that nothing in them is expanded

# Written by `clustertrain submit`. What was decided, and why, is in plan.json beside this file.

set -u
agent_python=/opt/venv/bin/python
export CLUSTERTRAIN_HOME=/shared/ct
export CLUSTERTRAIN_RUN_DIR=/shared/ct/runs/demo-abcdef

# Chosen by the plan; what is set already stays.
export OMP_NUM_THREADS=${OMP_NUM_THREADS-1}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT-1}

# The snapshot of the user's code comes before everything else.
export PYTHONPATH=/shared/ct/runs/demo-abcdef/code:/shared/ct/runs/demo-abcdef/code/src"${PYTHONPATH:+:$PYTHONPATH}"

exec "$agent_python" -P -m clustertrain batch -- \
  srun --nodes=1 --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --export=ALL --task-epilog=/shared/ct/runs/demo-abcdef/agent_end.sh --cpu-bind=none --gpus-per-node=2 \
  "$agent_python" -P -m clustertrain agent
