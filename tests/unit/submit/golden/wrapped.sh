#!/bin/bash

# shellcheck disable=SC1003,SC2016  # values are quoted so that nothing in them is expanded

# Written by `clustertrain wrap`, which runs it on each node. What was decided, and why, is in plan.json beside this file.

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

# The snapshot of the user's code comes before everything else.
export PYTHONPATH=/shared/ct/runs/demo-abcdef/code"${PYTHONPATH:+:$PYTHONPATH}"

exec "$agent_python" -P -m clustertrain agent
