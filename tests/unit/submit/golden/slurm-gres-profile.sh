#!/bin/bash
#SBATCH --job-name=demo-abcdef
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --mem=0
#SBATCH --account="proj 1"
#SBATCH --constraint=a100&ib
#SBATCH --dependency=afterok:12
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --output=job.log
#SBATCH --mail-user=me@example.org
#SBATCH --exclusive

# shellcheck disable=SC1003,SC2016  # values are quoted so that nothing in them is expanded
# shellcheck disable=SC1090,SC1091  # what the set-up sources is on the cluster

# Written by `clustertrain submit`. What was decided, and why, is in plan.json beside this file.

# Set-up of the cluster profile; before `set -u`, which module and conda do not survive.
module load cuda/12.4
ulimit -l unlimited

set -u
agent_python=/opt/venv/bin/python
export CLUSTERTRAIN_HOME=/shared/ct
export CLUSTERTRAIN_RUN_DIR=/shared/ct/runs/demo-abcdef

# Chosen by the plan; what is set already stays.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME-ib0}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME-ib0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS-1}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT-1}

exec "$agent_python" -P -m clustertrain batch -- \
  srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --export=ALL --task-epilog=/shared/ct/runs/demo-abcdef/agent_end.sh --cpu-bind=none --gres=gpu:8 \
  "$agent_python" -P -m clustertrain agent
