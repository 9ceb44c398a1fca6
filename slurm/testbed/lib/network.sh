# shellcheck shell=bash disable=SC2154  # the variables come from common.sh
# Four hosts as network namespaces on one bridge. Every function is idempotent. Sourced, never run.

subnet=10.77.0
bridge=ctbr0
bridge_address=$subnet.1
# The testbed's lines in /etc/hosts end with this tag.
hosts_tag='# clustertrain-testbed'

node_address() { printf '%s.%d\n' "$subnet" $((10 + 10#${1#node})); }
node_netns() { printf 'clustertrain-%s\n' "$1"; }
node_link() { printf 'ct-%s\n' "$1"; }

# in_netns NODE COMMAND...: run it in the node's namespace. ip-netns-exec would mount a new /sys, without the
# /sys/fs/cgroup that slurmd needs.
in_netns() {
    nsenter --net="/run/netns/$(node_netns "$1")" "${@:2}"
}

# Print the hosts whose namespaces exist, also those of a testbed whose state folder is gone.
existing_nodes() { { ip netns list 2>/dev/null || true; } | sed -n 's/^clustertrain-\(node[0-9][0-9]\)\b.*/\1/p'; }

# Query ip, not /sys: a shell in its own network namespace may see the /sys of another one.
link_exists() { ip link show "$1" >/dev/null 2>&1; }

# Print the state folder that the bridge belongs to; nothing without a bridge.
bridge_owner() { { ip link show "$bridge" 2>/dev/null || true; } | sed -n 's/^ *alias //p'; }

refuse_foreign_network() {
    local owner route
    if link_exists "$bridge"; then
        owner=$(bridge_owner)
        # An empty owner is this testbed: up was interrupted between creating the bridge and naming its owner.
        [[ -z $owner || $owner == "$state" ]] ||
            die "a testbed with another state folder is up; end it: CLUSTERTRAIN_TESTBED_DIR=$owner $testbed/down"
    fi
    route=$(ip -4 -o route show "$subnet.0/24" | grep -v " dev $bridge " || true)
    [[ -z $route ]] || die "the network $subnet.0/24 is in use on this machine: $route"
}

# Where Docker runs, the kernel passes bridged packets to iptables, and Docker's policy for forwarded ones is DROP.
bridge_rule=(FORWARD -i "$bridge" -o "$bridge" -j ACCEPT)

firewall_open() {
    [[ $(cat /proc/sys/net/bridge/bridge-nf-call-iptables 2>/dev/null) == 1 ]] && command -v iptables >/dev/null || return 0
    iptables -w 10 -C "${bridge_rule[@]}" 2>/dev/null || iptables -w 10 -I "${bridge_rule[@]}"
}

firewall_close() {
    command -v iptables >/dev/null || return 0
    iptables -w 10 -D "${bridge_rule[@]}" 2>/dev/null || true
}

network_up() {
    local node
    link_exists "$bridge" || ip link add "$bridge" type bridge
    firewall_open
    ip link set "$bridge" alias "$state"
    ip addr replace "$bridge_address/24" dev "$bridge"
    ip link set "$bridge" up
    for node in "${nodes[@]}"; do
        node_network_up "$node"
    done
    hosts_add
}

node_network_up() {
    local node=$1 netns link
    netns=$(node_netns "$node")
    link=$(node_link "$node")
    # An interrupted "ip netns add" leaves a file without a namespace.
    if ! in_netns "$node" true 2>/dev/null; then
        ip netns delete "$netns" 2>/dev/null || true
        ip netns add "$netns"
    fi
    if ! link_exists "$link" || ! in_netns "$node" ip link show eth0 >/dev/null 2>&1; then
        ip link delete "$link" 2>/dev/null || true
        ip link add "$link" type veth peer name eth0 netns "$netns"
    fi
    ip link set "$link" master "$bridge" up
    in_netns "$node" ip link set lo up
    in_netns "$node" ip addr replace "$(node_address "$node")/24" dev eth0
    in_netns "$node" ip link set eth0 up
}

link_is_up() { ip link show "$(node_link "$1")" 2>/dev/null | grep -q ' state UP '; }

network_down() {
    local node
    for node in $({ printf '%s\n' "${nodes[@]}"; existing_nodes; } | sort -u); do
        # Deleting one end of a veth pair deletes the other at once; deleting only the namespace would do it later.
        ip link delete "$(node_link "$node")" 2>/dev/null || true
        ip netns delete "$(node_netns "$node")" 2>/dev/null || true
    done
    ip link delete "$bridge" 2>/dev/null || true
    firewall_close
    hosts_remove
}

# Written in place: in a container /etc/hosts is a separate mount, which a rename cannot replace.
hosts_write() {
    local text=$1
    [[ $text == "$(cat /etc/hosts; printf x)" ]] || printf '%s' "${text%x}" >/etc/hosts
}

# The trailing x keeps the file's last newlines in a command substitution.
hosts_without_testbed() {
    grep -v -- "$hosts_tag\$" /etc/hosts || true
    printf x
}

hosts_add() {
    local node lines address
    lines=$(hosts_without_testbed)
    lines=${lines%x}
    lines+="$bridge_address testbed-ctl $hosts_tag"$'\n'
    for node in "${nodes[@]}"; do
        lines+="$(node_address "$node") $node $hosts_tag"$'\n'
    done
    hosts_write "${lines}x"
    for node in "${nodes[@]}"; do
        address=$(getent ahostsv4 "$node" | awk 'NR == 1 { print $1 }')
        [[ $address == "$(node_address "$node")" ]] ||
            die "the name $node resolves to ${address:-nothing}, not to $(node_address "$node"): see /etc/hosts"
    done
}

hosts_remove() { hosts_write "$(hosts_without_testbed)"; }

# Send SIGKILL to every process in the host's namespace until none is left: a process may fork while it is being killed.
kill_host_processes() {
    local node=$1 pids
    local deadline=$((SECONDS + 20))
    [[ -e /run/netns/$(node_netns "$node") ]] || return 0
    while true; do
        # Zombies are still listed, but wait for their parent, whatever the signal.
        pids=$(for pid in $(ip netns pids "$(node_netns "$node")"); do
            [[ $(sed 's/.*) //; s/ .*//' "/proc/$pid/stat" 2>/dev/null) == [ZX] ]] || printf '%s ' "$pid"
        done)
        [[ -n $pids ]] || return 0
        ((SECONDS < deadline)) || die "processes of $node survive SIGKILL: $pids"
        # shellcheck disable=SC2086  # a list of numbers
        kill -KILL $pids 2>/dev/null || true
        sleep 0.05
    done
}
