#!/bin/sh
# The scheduler runs this on a node after the agent there has ended, in whatever way (srun --task-epilog). A killed agent
# can neither say that it is gone nor remove its temporary folder.
PATH=/usr/bin:/bin
node=${CLUSTERTRAIN_NODE:-${SLURMD_NODENAME:-}}
results=$CLUSTERTRAIN_RUN_DIR/attempts/$CLUSTERTRAIN_ATTEMPT/results
[ -n "$node" ] && [ -d "$results" ] || exit 0
[ -e "$results/$node.json" ] || : > "$results/$node.gone"
for folder in "${TMPDIR:-/tmp}/clustertrain-${CLUSTERTRAIN_RUN_DIR##*/}-$CLUSTERTRAIN_ATTEMPT-$node-"????????; do
    [ -d "$folder/containers" ] || continue
    # Not every container ends with the agent: podman's has another parent.
    grep -lsxzF "CLUSTERTRAIN_RANK_DIR=$folder" /proc/[0-9]*/environ | tr -dc '0-9\n' | xargs -r kill -KILL 2>/dev/null
    sh "$folder/containers/clean-up.sh"
done
rm -rf -- "${TMPDIR:-/tmp}/clustertrain-${CLUSTERTRAIN_RUN_DIR##*/}-$CLUSTERTRAIN_ATTEMPT-$node-"????????
