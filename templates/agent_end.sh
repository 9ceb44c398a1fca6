#!/bin/sh
# The scheduler runs this on a node after the agent there has ended, in whatever way (srun --task-epilog). A killed agent
# can neither say that it is gone nor remove its temporary folder.
PATH=/usr/bin:/bin
node=${CLUSTERTRAIN_NODE:-${SLURMD_NODENAME:-}}
results=$CLUSTERTRAIN_RUN_DIR/attempts/$CLUSTERTRAIN_ATTEMPT/results
[ -n "$node" ] && [ -d "$results" ] || exit 0
[ -e "$results/$node.json" ] || : > "$results/$node.gone"
rm -rf -- "${TMPDIR:-/tmp}/clustertrain-${CLUSTERTRAIN_RUN_DIR##*/}-$CLUSTERTRAIN_ATTEMPT-$node-"????????
