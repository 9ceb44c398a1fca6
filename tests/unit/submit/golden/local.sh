#!/bin/bash

# shellcheck disable=SC1003,SC2016  # values are quoted so that nothing in them is expanded

# Written by `clustertrain submit`. What was decided, and why, is in plan.json beside this file.

set -u
agent_python=/opt/venv/bin/python
export CLUSTERTRAIN_HOME=/shared/ct
export CLUSTERTRAIN_RUN_DIR=/shared/ct/runs/demo-abcdef

# Chosen by the plan; what is set already stays.
export OMP_NUM_THREADS=${OMP_NUM_THREADS-1}

exec "$agent_python" -P -m clustertrain batch -- \
  "$agent_python" -P -m clustertrain.scheduler.local_srun --nodes 2 --gpus 2 -- \
  "$agent_python" -P -m clustertrain agent
