#!/usr/bin/env python3
"""Reads events of exotrace: read_events.py ptrace|trace|json [FILE|SOCKET|-]

ptrace: records of 28 bytes; trace: lines of 121 bytes; json: what `exotrace read ptrace|trace --format json` writes, one object a line.
The events come from a file, from the socket `ptrace` or `trace` in a machine's run directory, or from a pipe. Needs only Python 3.8."""

import json, os, socket, stat, struct, sys

RECORD = struct.Struct("<IIIqQ")  # process, type, CPU, nanoseconds since 1970, argument
LINE_BYTES = 121  # E or X, then PC, ticks, process and four arguments, in hexadecimal
TYPES = "admit release edf run ready sleep yield slice deadline expel dead ints inte trap user name".split()

def open_source(path):
    if path == "-":
        return sys.stdin.buffer
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return open(path, "rb")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection.makefile("rb")

def pieces(source, size):
    while piece := source.read(size):
        if len(piece) < size:
            sys.exit(f"the last event has {len(piece)} bytes instead of {size}")
        yield piece

def ptrace_events(source):
    for pid, number, cpu, time, arg in map(RECORD.unpack, pieces(source, RECORD.size)):
        event = TYPES[number] if number < len(TYPES) else "unknown"
        yield {"event": event, "pid": pid, "cpu": cpu, "time": time, "arg": hex(arg)}

def trace_events(source):
    for line in pieces(source, LINE_BYTES):
        kind, pc, ticks, pid, *args = line.decode("ascii").split()
        event = {"event": "entry" if kind == "E" else "return", "pid": int(pid, 16), "pc": hex(int(pc, 16)), "tsc": int(ticks, 16)}
        yield {**event, "args": [hex(int(arg, 16)) for arg in args[: 4 if kind == "E" else 1]]}

READERS = {"ptrace": ptrace_events, "trace": trace_events, "json": lambda source: map(json.loads, source)}
if len(sys.argv) not in (2, 3) or sys.argv[1] not in READERS:
    sys.exit(__doc__)
try:
    for event in READERS[sys.argv[1]](open_source((sys.argv + ["-"])[2])):
        print(event.get("time", event.get("tsc")), event["pid"], event["event"],
              *(f"{name}={value}" for name, value in event.items() if name not in ("time", "tsc", "pid", "event")), flush=True)
except (BrokenPipeError, KeyboardInterrupt):  # the reader has closed its end
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
