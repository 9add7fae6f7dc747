#!/bin/sh
# Traces the programs of a distribution in an image that debian.sh has made, on an emulated host:
#
#   tests/images/debian.sh trixie images/debian-13-programs.qcow2 \
#       postgresql nginx-light python3 systemd-container netcat-openbsd
#   cargo host svm --memory 6144 --limit 3000 --put tests/images/guest.sh --put tests/images/programs.sh --put images -- \
#       sh programs.sh images/debian-13-programs.qcow2 [ROUNDS]
#
# PostgreSQL under pgbench by its USDT probes, nginx under requests from the host, Python by its USDT
# probes, a container of systemd-nspawn, a package that dpkg installs, and a module that is loaded
# late. Each trace must have seen what was done. Prints pgbench's and nginx' rates untraced, with a
# thousand probes armed elsewhere, and with system calls counted, ROUNDS times (3).
set -u
image=$1
rounds=${2:-3}
. ./guest.sh
# Starts a script of bt, whose output is trace.txt, and waits until its probes are armed.
traces() {
    : >trace.txt
    exotrace trace --vm m -e "BEGIN { printf(\"armed\\n\"); } $1" >trace.txt 2>trace.log &
    tracing=$!
    until grep -q armed trace.txt; do
        alive $tracing || fail "trace: $1"
        sleep 0.2
    done
}
# Ends it with its maps printed.
ends() {
    kill -INT $tracing
    wait $tracing || fail "the end of a trace"
}
# Fails unless a line of the trace matches.
seen() { grep -Eq "$1" trace.txt || fail "not in the trace: $1"; }

start=$(now)
exotrace run --image "$image" --overlay --net user,host=2222:22,host=8080:80 --name m --memory 1G \
    --serial m.serial 2>m.log &
machine=$!
answers exotrace "$start" $machine

# PostgreSQL
postgres=$(guest 'ls /usr/lib/postgresql/*/bin/postgres')
guest 'systemctl start postgresql; until su postgres -c "psql -qc \"select 1\"" >/dev/null 2>&1; do sleep 0.5; done'
guest 'su postgres -c "createdb bench && pgbench -qi bench"' 2>/dev/null || fail "pgbench -i"
bench() { guest "su postgres -c 'pgbench -n -t $1 bench'" 2>/dev/null | sed -n 's/^tps = \([0-9.]*\).*/\1/p'; }
echo "pgbench: $(bench 200) transactions a second untraced"
traces "usdt:$postgres:postgresql:transaction__start { @started = count(); }
    usdt:$postgres:postgresql:transaction__commit { @committed = count(); }"
echo "pgbench: $(bench 50) with its transactions traced"
ends
cat trace.txt
[ "$(sed -n 's/^@committed: //p' trace.txt)" -ge 50 ] || fail "fewer commits than transactions"
elsewhere='kprobe:acpi_*:entry { @elsewhere = count(); }'
echo "$(exotrace list --vm m 'kprobe:acpi_*:entry' 2>/dev/null | wc -l) functions of ACPI, which a guest at work does not call"
rates() {
    echo "$1: $($2) untraced"
    traces "$elsewhere"
    echo "$1: $($2) with probes armed elsewhere"
    ends
    traces 'syscall:::entry { @[comm] = count(); }'
    echo "$1: $($2) with system calls counted"
    ends
}
transactions() { bench 300; }
for _ in $(seq "$rounds"); do rates 'pgbench, transactions a second' transactions; done
guest 'systemctl stop postgresql'

# nginx
guest 'systemctl start nginx'
requests() {
    begin=$(now)
    for _ in $(seq 100); do
        printf 'GET / HTTP/1.0\r\n\r\n' | busybox nc 127.0.0.1 8080 | grep -q 'Welcome to nginx' || fail "nginx"
    done
    echo "$begin $(now)" | awk '{ printf("%.1f", 100 / ($2 - $1)) }'
}
traces 'uprobe:/usr/sbin/nginx:ngx_http_process_request:entry { @requests = count(); }'
requests >/dev/null
ends
cat trace.txt
seen '^@requests: 100$'
for _ in $(seq "$rounds"); do rates 'nginx, requests a second' requests; done
guest 'systemctl stop nginx'

# Python
python=$(guest 'readlink -f /usr/bin/python3')
# A file is known by its pages in memory, so a process has to have it.
guest 'systemd-run -q --unit=waits python3 -c "import time; time.sleep(1000)"; until pgrep -x python3 >/dev/null; do sleep 0.5; done'
traces "usdt:$python:python:gc__start { @collections = count(); }"
guest 'python3 -c "import gc; [gc.collect() for _ in range(7)]"'
ends
cat trace.txt
seen '^@collections: ([7-9]|[1-9][0-9]+)$'

# A container
traces 'tracepoint:sched:sched_process_exec { @[comm] = count(); }'
guest 'systemd-nspawn -q --volatile=yes -D / --pipe /usr/bin/sha1sum /usr/bin/env' >container.txt 2>&1 || fail "nspawn"
ends
seen '^@\[sha1sum\]: 1$'
guest 'systemd-run -q --unit=inside systemd-nspawn -q --volatile=yes -D / -M inside --pipe /usr/bin/sleep 1000; until pgrep -x sleep; do sleep 0.5; done' >/dev/null
exotrace ps --vm m | grep -E 'CONTAINER|sleep'
guest 'systemctl stop inside'

# A package installed, its dpkg traced
guest 'mkdir -p /root/p/DEBIAN /root/p/opt; printf "Package: traced\nVersion: 1\nArchitecture: all\nMaintainer: nobody <n@example.org>\nDescription: traced\n" >/root/p/DEBIAN/control; echo file >/root/p/opt/traced; dpkg-deb -b /root/p /root/traced.deb' >/dev/null
exotrace list --vm m 'uprobe:/usr/bin/dpkg:*:entry' >dpkg.txt 2>&1
echo "functions of dpkg: $(wc -l <dpkg.txt), $(tail -n 1 dpkg.txt)"
traces 'tracepoint:sched:sched_process_exec { @[comm] = count(); } uprobe:/usr/lib/x86_64-linux-gnu/libc.so.6:fsync:entry /comm == "dpkg"/ { @synced = count(); }'
guest 'apt-get install -qq -y /root/traced.deb' >apt.txt 2>&1 || fail "apt"
ends
cat trace.txt
seen '^@\[dpkg\]: [1-9]'
seen '^@synced: [1-9]'
[ "$(guest 'cat /opt/traced')" = file ] || fail "the package is not installed"

# A module that comes late
traces 'kprobe:dummy:dummy_setup:entry { @setups = count(); }'
guest 'modprobe dummy numdummies=3'
ends
cat trace.txt
seen '^@setups: 3$'

exotrace stop --vm m --gracefully || fail "stop --gracefully"
wait $machine || fail "the status of the run"
echo "all as it should be"
