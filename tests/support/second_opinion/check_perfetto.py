#!/usr/bin/env python3
"""Decodes a Perfetto file with the protobuf definitions of PyPI's package `perfetto`, and checks the assumptions of its UI.

    check_perfetto.py FILE

Checks that no field is unknown, at any level. The clock of each time must be in the clock snapshot at the start of the file. Every packet must
belong to a sequence. Every event must be on a track that was described before it, with a name. Times on a track must not decrease. Each slice
must begin and end on the same track, and each arrow must begin before it ends. Prints counts, and the names of the tracks that have events.
If a check fails, prints the first mistakes on standard error and ends with status 1.
"""

import sys
from collections import Counter

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import BuiltinClock, Trace, TracePacket, TrackEvent

SHOWN = 20
mistakes = []


def wrong(where, what):
    mistakes.append(f"{where}: {what}")


def known(message, where):
    """Records the unknown fields of the message and of those within it."""
    for field in UnknownFieldSet(message):
        wrong(where, f"{message.DESCRIPTOR.full_name} has no field {field.field_number}")
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for each in [value] if isinstance(value, Message) else value:
                known(each, where)


def track_name(described):
    """Returns the name of the track in the UI; empty if there is none."""
    if described.HasField("thread"):
        thread = described.thread
        return f"{thread.thread_name} {thread.tid}" if thread.thread_name and thread.tid else ""
    if described.HasField("process"):
        process = described.process
        return f"{process.process_name} {process.pid}" if process.process_name and process.pid else ""
    return described.name


def check(trace):
    count = Counter()
    names, open_slices, last = {}, Counter(), {}
    begun, ended, clocks = set(), set(), set()
    with_events = set()
    for number, packet in enumerate(trace.packet):
        where = f"packet {number}"
        known(packet, where)
        if not packet.trusted_packet_sequence_id:
            wrong(where, "no sequence")
        if number == 0:
            if not packet.sequence_flags & TracePacket.SEQ_INCREMENTAL_STATE_CLEARED:
                wrong(where, "the first packet does not clear the sequence's state")
            if not packet.HasField("clock_snapshot"):
                wrong(where, "the first packet has no clocks")
        data = packet.WhichOneof("data")
        count[data] += 1
        if data == "clock_snapshot":
            clocks |= {clock.clock_id for clock in packet.clock_snapshot.clocks}
            primary = packet.clock_snapshot.primary_trace_clock
            if primary not in clocks or primary not in BuiltinClock.values():
                wrong(where, f"the timeline's clock {primary} is not among {clocks}")
        elif data == "track_descriptor":
            described = packet.track_descriptor
            names[described.uuid] = track_name(described)
            if not described.uuid or not names[described.uuid]:
                wrong(where, f"track {described.uuid} has no name")
            if described.HasField("parent_uuid") and described.parent_uuid not in names:
                wrong(where, f"track {described.uuid} is below {described.parent_uuid}, which is not known")
        elif data == "track_event":
            event, time = packet.track_event, packet.timestamp
            track = event.track_uuid
            where += f" at {time} on {names.get(track)!r}"
            with_events.add(track)
            if track not in names:
                wrong(where, f"track {track} is not known")
            if packet.timestamp_clock_id not in clocks:
                wrong(where, f"clock {packet.timestamp_clock_id} is not known")
            if time < last.get(track, 0):
                wrong(where, f"the event before was at {last[track]}")
            last[track] = time
            kind = TrackEvent.Type.Name(event.type)
            count[kind] += 1
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                open_slices[track] += 1
            elif event.type == TrackEvent.TYPE_SLICE_END:
                open_slices[track] -= 1
                if open_slices[track] < 0:
                    wrong(where, "ends what has not begun")
                    open_slices[track] = 0
            elif event.type != TrackEvent.TYPE_INSTANT:
                wrong(where, f"is of type {kind}")
            if event.type != TrackEvent.TYPE_SLICE_END and not event.name:
                wrong(where, "has no name")
            for flow in event.flow_ids:
                if flow in begun:
                    wrong(where, f"arrow {flow} begins again")
                begun.add(flow)
            for flow in event.terminating_flow_ids:
                if flow not in begun or flow in ended:
                    wrong(where, f"arrow {flow} ends, and has not begun or has ended before")
                ended.add(flow)
        else:
            wrong(where, f"holds {data}")
    for track, still in open_slices.items():
        if still:
            wrong(names.get(track), f"{still} slices do not end")
    count["flows"], count["flows_open"] = len(ended), len(begun - ended)
    return count, sorted(names[track] for track in with_events if track in names)


def main():
    trace = Trace()
    with open(sys.argv[1], "rb") as file:
        trace.ParseFromString(file.read())
    for field in UnknownFieldSet(trace):
        wrong("the file", f"Trace has no field {field.field_number}")
    count, tracks = check(trace)
    if not trace.packet:
        wrong("the file", "no packets")
    for mistake in mistakes[:SHOWN]:
        print(mistake, file=sys.stderr)
    if mistakes:
        sys.exit(f"{len(mistakes)} mistakes")
    for what, number in sorted(count.items()):
        print(what, number)
    for name in tracks:
        print("track", name)


if __name__ == "__main__":
    main()
