# shellcheck shell=bash disable=SC2154  # the variables come from common.sh and network.sh
# Find, start and stop the daemons. Sourced, never run.
#
# A mark in its environment identifies a daemon: it names the state folder and the daemon, and no user's shell has it. So
# there is no pid file, which could be stale or name another process. A second mark is a checksum of the configuration
# that the daemon was started with: if it differs, the daemon is restarted.

slurmctld_port=16817
slurmd_port=16818
slurmdbd_port=16819
mariadb_port=16806

slurm_stamp() { cat "$state"/etc/{slurm,gres,cgroup}.conf | cksum | tr ' ' -; }
file_stamp() { cksum <"$1" | tr ' ' -; }

# daemon_pids NAME PROGRAM [STAMP]: print the daemon's pids. slurmd's steps inherit its mark, so the program must match.
daemon_pids() {
    local environ pid program executable
    # Debian's slurmd is a link to slurmd-wlm.
    executable=$(realpath -- "$(command -v "$2")")
    while IFS= read -r environ; do
        pid=${environ#/proc/}
        pid=${pid%/environ}
        program=$(readlink "/proc/$pid/exe" 2>/dev/null) || continue
        [[ ${program% (deleted)} == "$executable" ]] || continue
        if (($# < 3)) || grep -qszxF -- "CLUSTERTRAIN_TESTBED_CONFIG=$3" "$environ"; then
            printf '%s\n' "$pid"
        fi
    done < <(grep -lszxF -- "CLUSTERTRAIN_TESTBED_DAEMON=$state:$1" /proc/[0-9]*/environ || true)
}

# Print the pids of all processes with the mark, including the steps of jobs.
all_marked_pids() {
    grep -lsz -- "^CLUSTERTRAIN_TESTBED_DAEMON=${state//./\\.}:" /proc/[0-9]*/environ | tr -dc '0-9\n' || true
}

no_daemon() { [[ -z $(daemon_pids "$1" "$2") ]]; }

# start_daemon NAME STAMP COMMAND...: start it in a new session with a clean environment; set started_pid.
start_daemon() {
    local name=$1 stamp=$2
    shift 2
    # A background job of a script ignores SIGINT and SIGQUIT, which every job of the cluster would inherit.
    setsid env --default-signal=INT,QUIT -i PATH="$PATH" LANG=C.UTF-8 SLURM_CONF="$state/etc/slurm.conf" \
        CLUSTERTRAIN_TESTBED_DAEMON="$state:$name" CLUSTERTRAIN_TESTBED_CONFIG="$stamp" \
        "$@" </dev/null >"$state/log/$name.stderr" 2>&1 {lock_fd}<&- &
    started_pid=$!
}

stop_daemon() {
    local name=$1 program=$2 pids
    pids=$(daemon_pids "$name" "$program")
    [[ -n $pids ]] || return 0
    # shellcheck disable=SC2086  # a list of numbers
    kill -TERM $pids 2>/dev/null || true
    wait_until 10 no_daemon "$name" "$program" && return 0
    pids=$(daemon_pids "$name" "$program")
    # shellcheck disable=SC2086
    kill -KILL $pids 2>/dev/null || true
    wait_until 10 no_daemon "$name" "$program" || die "$name survives SIGKILL: $pids"
}

# process_ended PID: succeed if the process is gone or a zombie.
process_ended() {
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
    [[ ${stat##*) } == [ZX]* ]]
}

refuse_taken_port() {
    local name=$1 port=$2 taken
    taken=$(ss -Hltnp "sport = :$port")
    [[ -z $taken ]] || die "port $port, which $name needs, is used by a process outside this testbed: $taken"
}

# ensure_daemon NAME PROGRAM PORT STAMP PROBE START: ensure that the daemon runs with this configuration and answers.
# PROBE and START are names of functions. PORT is - for a daemon without a port.
ensure_daemon() {
    local name=$1 program=$2 port=$3 stamp=$4 probe=$5 start=$6
    if [[ -n $(daemon_pids "$name" "$program" "$stamp") ]] && wait_until 15 "$probe"; then
        return 0
    fi
    stop_daemon "$name" "$program"
    [[ $port == - ]] || refuse_taken_port "$name" "$port"
    "$start" "$stamp"
    local pid=$started_pid deadline=$((SECONDS + 60))
    until "$probe" >/dev/null 2>&1; do
        process_ended "$pid" && die_log "$name" "$name ended right after its start"
        ((SECONDS < deadline)) || die_log "$name" "$name does not answer after 60 s"
        sleep 0.1
    done
}

munged_answers() { munge -n -S "$state/munge/socket" | unmunge -S "$state/munge/socket"; }

# A separate munged, as root and with its own key: the machine's munged is not touched.
munged_start() {
    start_daemon munged "$1" munged --foreground --socket="$state/munge/socket" --key-file="$state/munge/key" \
        --pid-file="$state/munge/pid" --seed-file="$state/munge/seed" --force
}

mariadb_answers() { mariadb --no-defaults -S "$state/run/mariadb.sock" -e 'USE slurm_acct'; }
mariadb_start() { start_daemon mariadb "$1" mariadbd --defaults-file="$state/etc/mariadb.cnf"; }

slurmdbd_answers() { client sacctmgr -n -r list cluster; }
slurmdbd_start() { start_daemon slurmdbd "$1" unshare --uts sh -c 'hostname testbed-ctl; exec slurmdbd -D'; }

slurmctld_answers() { client scontrol ping | grep -q ' is UP'; }

slurmctld_start() {
    local fresh=
    # Without -c, an empty state folder is an error; with it, existing state is discarded.
    [[ -e $state/slurmctld/job_state ]] || fresh=-c
    # shellcheck disable=SC2016
    start_daemon slurmctld "$1" unshare --uts sh -c 'hostname testbed-ctl; exec slurmctld -D $1' sh "$fresh"
}

slurmd_listens() { in_netns "$1" ss -Hltn "sport = :$slurmd_port" | grep -q .; }

slurmd_start() {
    local node=$1 stamp=$2
    start_daemon "slurmd-$node" "$stamp" nsenter --net="/run/netns/$(node_netns "$node")" \
        unshare --uts sh -c "hostname $node; exec slurmd -D -N $node"
}

# ensure_slurmd NODE: start slurmd if it does not run; wait_node_ready waits for it.
ensure_slurmd() {
    local node=$1 stamp
    stamp=$(slurm_stamp)
    if [[ -z $(daemon_pids "slurmd-$node" slurmd "$stamp") ]]; then
        # Its steps, the processes of jobs, survive a stop, and the next slurmd finds them.
        stop_daemon "slurmd-$node" slurmd
        mkdir -p "$state/slurmd/$node"
        slurmd_start "$node" "$stamp"
    fi
}

node_state() { client sinfo -h -N -n "$1" -p low -o %T; }

# node_ready NODE: succeed if it is registered with slurmctld and accepts jobs. A node that was down is resumed.
node_ready() {
    slurmd_listens "$1" || return 1
    case $(node_state "$1") in
        idle | mixed | allocated | completing) return 0 ;;
        down* | drain*) client scontrol update nodename="$1" state=resume ;;
    esac
    return 1
}

wait_node_ready() {
    wait_until 45 node_ready "$1" ||
        die_log "slurmd-$1" "$1 accepts no jobs after 45 s, is $(node_state "$1" 2>&1); also: $state/log/slurmctld.log"
}

# With --proctrack cgroup, each slurmd has a folder in the freezer, which outlives it.
release_cgroups() {
    local node folder
    for node in "${nodes[@]}"; do
        folder=/sys/fs/cgroup/freezer/slurm_$node
        # The kernel empties a group some time after its last process has ended.
        [[ ! -d $folder ]] || wait_until 10 find "$folder" -depth -type d -exec rmdir {} + ||
            die "could not remove $folder"
    done
}
