# Loops in a guest that each stress one part of a machine or its tracers, until /tmp/stop exists:
# victims [NAME]... Each loop prints its number of rounds at the end, and errors
# at once. AREA is the address of the last 64 KiB of memory, which the kernel does not use. COUNTED
# is the address of a function in /bin/alarms.

tracing=/sys/kernel/tracing
ports=/dev/virtio-ports

loop() {
    rounds=0
    while [ ! -e /tmp/stop ]; do
        "$1" > "/tmp/out.$1" 2>&1 || echo "victim $1 failed in round $rounds: $(tail -c 300 "/tmp/out.$1")"
        rounds=$((rounds + 1))
    done
    echo "victim $1: $rounds rounds"
}

# Programs in states of the CPU that few use, compared with their untraced output.
flags() { [ "$(states 2)" = "$STATES" ]; }
itself() { [ "$(selfmod 5)" = "$SELFMOD" ]; }
again() { twins 50; }
signals() { alarms 400; }

storm() { forks 5 && for _ in 1 2 3; do busybox true || return 1; done; }

# Text that moves to another address, is unmapped, or is inherited by a child.
movers() {
    for way in away gone fork; do
        moves $way & left=$!
        for _ in 1 2 3 4; do
            busybox killall -q -CONT moves || break
            sleep 0.05
        done
        busybox killall -q -KILL moves
        wait $left
    done
    true
}

modules() {
    insmod /lib/brd.ko || return 1
    dd if=/dev/zero of=/dev/ram0 bs=4k count=4
    for _ in 1 2 3 4 5; do
        rmmod brd && return
        sleep 0.1
    done
    return 1
}

# The guest's own tracers, at places that others trace, too.
kprobes() {
    echo 'p:kept vfs_read' > $tracing/kprobe_events && echo 'r:left vfs_write' >> $tracing/kprobe_events || return 1
    echo 1 > $tracing/events/kprobes/enable
    cat /proc/version
    echo 0 > $tracing/events/kprobes/enable
    echo > $tracing/kprobe_events
}
uprobes() {
    echo "p:counted /bin/alarms:$COUNTED" > $tracing/uprobe_events || return 1
    echo 1 > $tracing/events/uprobes/enable
    alarms 50; status=$?
    echo 0 > $tracing/events/uprobes/enable
    echo > $tracing/uprobe_events
    return $status
}
functions() {
    echo function > $tracing/current_tracer || return 1
    cat /proc/version
    echo nop > $tracing/current_tracer
    echo > $tracing/trace
}

# The machine may refuse these.
floods() {
    for command in 'trace vfs_read vfs_write new flood' 'trace flood on' 'trace flood off' 'trace flood remove'; do
        echo "$command" > $ports/tracectl
    done
    for port in tracectl ptracectl dt; do
        dd if=/dev/urandom of=$ports/$port bs=1000 count=3
    done
    dd if=$ports/trace of=/dev/null bs=121 count=20
    true
}

# A device's driver is unbound from it and bound again.
rings() {
    for driver in virtio_blk virtio_rng; do
        folder=/sys/bus/virtio/drivers/$driver
        found=$(busybox readlink -f $folder/virtio*)
        device=${found##*/} place=${found%/*}
        set -- $(grep "${place##*/}" /proc/iomem)
        echo "$device" > $folder/unbind || return 1
        queues $((0x${1%%-*})) $AREA 20 ${rounds:-0}; status=$?
        echo "$device" > $folder/bind || return 1
        [ $status = 0 ] || return 1
    done
    dd if=/dev/vda of=/dev/null bs=4k count=8
}

# Keeps the output of programs while nothing is traced, and starts the counting program.
victims_prepare() {
    mount -t tracefs t $tracing || return 1
    STATES=$(states 2) && SELFMOD=$(selfmod 5) && export STATES SELFMOD
    cp /bin/alarms /tmp/exact && cp /bin/syscount /tmp/calls
    # Mapped by an idle process: a probe of a file that nobody has mapped yet may miss the first
    # calls.
    /tmp/exact 1000000000 &
    KEPT=$!
    until grep -q /tmp/exact /proc/$KEPT/maps; do sleep 0.1; done
    kill -STOP $KEPT
    # A kernel takes long to search all its functions.
    echo 'vfs_*' > $tracing/set_ftrace_filter || return 1
    # Text that the kernel changes the first time only.
    for victim in modules kprobes uprobes functions rings; do
        echo "$victim, a first time"
        $victim > /tmp/out 2>&1 || { cat /tmp/out; return 1; }
    done
}

victims() {
    rm -f /tmp/stop
    for victim in "$@"; do
        loop "$victim" &
    done
}

victims_stop() {
    touch /tmp/stop
    kill -KILL $KEPT
    wait
    # Commands of the ports that came last.
    for name in flood; do echo "trace $name remove" > $ports/tracectl; done 2> /dev/null
    echo > $tracing/kprobe_events; echo > $tracing/uprobe_events; echo nop > $tracing/current_tracer
}
