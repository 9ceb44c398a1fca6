# shellcheck shell=bash
# Shared by up, down, status and node: names and numbers, messages, waiting. Sourced, never run.

export LC_ALL=C
# After a plain su the PATH lacks the sbin folders, where the daemons are.
PATH=$PATH:/usr/sbin:/sbin
umask 022

testbed=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
state=$(realpath -m -- "${CLUSTERTRAIN_TESTBED_DIR:-/var/tmp/clustertrain-testbed}")

# Marks a folder as a testbed's: up writes into no other folder, down deletes no other folder. It contains the size, which
# is chosen when the testbed is created.
state_mark=$state/.clustertrain-testbed
readonly MAX_HOSTS=16 MAX_GPUS=16
hosts=4 gpus=8
if [[ -s $state_mark ]]; then read -r hosts gpus <"$state_mark"; fi

name_nodes() { mapfile -t nodes < <(seq -f 'node%02.0f' "$hosts"); }
name_nodes

# Exit status if this machine cannot run the testbed (not root, missing package): the tests are then skipped.
readonly CANNOT_RUN=77

say() { printf '%s\n' "testbed: $*"; }

die() {
    printf '%s\n' "testbed: $*" >&2
    exit 1
}

cannot_run() {
    printf '%s\n' "testbed: $*" >&2
    exit "$CANNOT_RUN"
}

# die_log NAME MESSAGE: print the message and the last lines of the log files of that name, and exit.
die_log() {
    local name=$1 log
    shift
    printf '%s\n' "testbed: $*" >&2
    for log in "$state/log/$name".{log,stderr}; do
        [[ -s $log ]] || continue
        printf '%s\n' "testbed: see $log; its last lines:" >&2
        tail -n 10 -- "$log" >&2
    done
    exit 1
}

# wait_until SECONDS COMMAND...: poll until the command succeeds; fail after SECONDS.
wait_until() {
    local limit=$1
    local deadline=$((SECONDS + limit))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || return 1
        sleep 0.1
    done
}

require_root() {
    [[ $EUID == 0 ]] || cannot_run "must run as root (network namespaces, device nodes); try: sudo $0"
}

require_commands() {
    local pair missing=() packages=()
    for pair in slurmctld:slurm-wlm slurmd:slurm-wlm scontrol:slurm-wlm slurmdbd:slurmdbd munged:munge \
        mariadbd:mariadb-server-core mariadb-install-db:mariadb-server-core mariadb:mariadb-client-core \
        ip:iproute2 ss:iproute2 nsenter:util-linux unshare:util-linux flock:util-linux setsid:util-linux hostname:hostname; do
        command -v "${pair%%:*}" >/dev/null && continue
        missing+=("${pair%%:*}")
        [[ " ${packages[*]} " == *" ${pair##*:} "* ]] || packages+=("${pair##*:}")
    done
    ((${#missing[@]} == 0)) || cannot_run "missing: ${missing[*]}. Run: apt-get install ${packages[*]}" \
        "(or slurm/install-packages)"
}

# Slurm's configuration files have no quoting, so the state folder's name must need none. munge's socket is in it,
# and the kernel allows 107 bytes for a socket's path.
require_plain_state_path() {
    [[ $state =~ ^/[A-Za-z0-9._/+-]+$ && ${#state} -le 80 ]] ||
        die "CLUSTERTRAIN_TESTBED_DIR=$state: needs a path of at most 80 characters from A-Z a-z 0-9 . _ / + -"
}

# One up, down or node at a time on the whole machine. The locked file always exists (up edits it in place), so nothing
# is left behind; the kernel releases the lock when the process dies.
take_lock() {
    exec {lock_fd}</etc/hosts
    flock -w 180 "$lock_fd" || die "another testbed command has been running for three minutes; see: fuser -v /etc/hosts"
}

# client COMMAND...: run a Slurm command against this cluster, with a timeout, without the caller's SLURM_* and SBATCH_*.
client() {
    env -i PATH="$PATH" SLURM_CONF="$state/etc/slurm.conf" timeout 10 "$@"
}
