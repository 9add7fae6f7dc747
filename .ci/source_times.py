#!/usr/bin/env python3
"""Keeps the times of sources with what was compiled of them, so that the next run of the checks
compiles no more than what differs: `source_times.py record|restore FILE`.

Cargo compiles a crate again if a file of it is newer than the crate's last build, and a checkout
makes all files new. `record` writes down each file's content, as a hash, and its time. `restore`
gives a file its recorded time if its content is the recorded one, and otherwise the time of now.
It takes the record away: builds of a run that is killed match none.
"""

import hashlib
import os
import subprocess
import sys
import time


def sources():
    """Returns the paths of the files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True).stdout
    return [path for path in listed.split(b"\0") if path and os.path.isfile(path) and not os.path.islink(path)]


def content(path):
    """Returns the hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def record(record_path):
    """Writes a line for each source: hash, time in nanoseconds, path."""
    with open(record_path + ".new", "wb") as record:
        for path in sources():
            record.write(b"%s %d %s\0" % (content(path).encode(), os.stat(path).st_mtime_ns, path))
    os.rename(record_path + ".new", record_path)


def restore(record_path):
    """Sets the times of all sources. Exits with an error if the record is of another clock."""
    # Of another clock: files that differ would not be newer than their builds.
    if os.stat(record_path).st_mtime > time.time():
        sys.exit(1)
    with open(record_path, "rb") as record:
        lines = [line.split(b" ", 2) for line in record.read().split(b"\0") if line]
    os.remove(record_path)
    recorded = {path: (sha256.decode(), int(mtime)) for sha256, mtime, path in lines}
    for path in sources():
        sha256, mtime = recorded.get(path, ("", 0))
        if content(path) == sha256:
            os.utime(path, ns=(mtime, mtime))
        else:
            os.utime(path)


{"record": record, "restore": restore}[sys.argv[1]](sys.argv[2])
