# Shared by the scripts that run on an emulated host, beside which it lies there: ways to the guest
# and to its answers. Sourced.

# The longest time in seconds until a guest answers.
limit=900

fail() {
    echo "FAILED: $*"
    tail -n 20 ./*.log ./*.txt ./*.serial 2>/dev/null
    exit 1
}
# Whether a program of this shell has not ended.
alive() { ! grep -qs '^State:[[:space:]]*Z' "/proc/$1/status" && [ -e "/proc/$1" ]; }
# Prints a time in seconds, and the seconds since one.
now() { cut -d ' ' -f 1 /proc/uptime; }
since() { echo "$1 $(now)" | awk '{ printf("%.1f", $2 - $1) }'; }
is_over() { [ "$(echo "$1 $(now) $2" | awk '{ print($2 - $1 > $3) }')" = 1 ]; }
# Runs a command in the guest behind a port of the host, or behind 2222.
guest_at() {
    port=$1
    shift
    ssh -F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR \
        -o ConnectTimeout=30 -p "$port" root@127.0.0.1 "$@" </dev/null
}
guest() { guest_at 2222 "$@"; }
# Waits until ssh answers, which a service does that starts with the login prompt. Prints a name
# and the seconds since a time. The arguments: the name, the time, the machine's process, the port.
answers() {
    until guest_at "${4:-2222}" true 2>/dev/null; do
        alive "$3" || fail "$1: the machine has ended"
        ! is_over "$2" $limit || fail "$1: no answer"
        sleep 0.2
    done
    echo "$1: ssh after $(since "$2") s"
}
