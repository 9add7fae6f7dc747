//! Numbers of the written fields, by message of Perfetto's `trace_packet.proto` and the files that
//! it imports, and values of their enumerations.

/// `Trace`: the file.
pub(super) mod trace {
    pub(in super::super) const PACKET: u32 = 1;
}

/// `TracePacket`.
pub(super) mod packet {
    pub(in super::super) const CLOCK_SNAPSHOT: u32 = 6;
    pub(in super::super) const TIMESTAMP: u32 = 8;
    pub(in super::super) const TRUSTED_PACKET_SEQUENCE_ID: u32 = 10;
    pub(in super::super) const TRACK_EVENT: u32 = 11;
    pub(in super::super) const SEQUENCE_FLAGS: u32 = 13;
    pub(in super::super) const TIMESTAMP_CLOCK_ID: u32 = 58;
    pub(in super::super) const TRACK_DESCRIPTOR: u32 = 60;
    pub(in super::super) const FIRST_PACKET_ON_SEQUENCE: u32 = 87;

    /// `SequenceFlags`: the state that earlier packets have set is void.
    pub(in super::super) const SEQ_INCREMENTAL_STATE_CLEARED: u64 = 1;
}

/// `ClockSnapshot` and its `Clock`.
pub(super) mod clock_snapshot {
    pub(in super::super) const CLOCKS: u32 = 1;
    pub(in super::super) const PRIMARY_TRACE_CLOCK: u32 = 2;

    pub(in super::super) const CLOCK_ID: u32 = 1;
    pub(in super::super) const CLOCK_TIMESTAMP: u32 = 2;

    /// `BuiltinClock`: CLOCK_REALTIME.
    pub(in super::super) const REALTIME: u64 = 1;
    /// `BuiltinClock`: CLOCK_BOOTTIME.
    pub(in super::super) const BOOTTIME: u64 = 6;
}

/// `TrackDescriptor`.
pub(super) mod track {
    pub(in super::super) const UUID: u32 = 1;
    pub(in super::super) const NAME: u32 = 2;
    pub(in super::super) const PROCESS: u32 = 3;
    pub(in super::super) const THREAD: u32 = 4;
    pub(in super::super) const PARENT_UUID: u32 = 5;
    pub(in super::super) const CHILD_ORDERING: u32 = 11;
    pub(in super::super) const SIBLING_ORDER_RANK: u32 = 12;

    /// `ChildTracksOrdering`: by each child's rank.
    pub(in super::super) const EXPLICIT: u64 = 3;
}

/// `ProcessDescriptor`.
pub(super) mod process {
    pub(in super::super) const PID: u32 = 1;
    pub(in super::super) const PROCESS_NAME: u32 = 6;
}

/// `ThreadDescriptor`.
pub(super) mod thread {
    pub(in super::super) const PID: u32 = 1;
    pub(in super::super) const TID: u32 = 2;
    pub(in super::super) const THREAD_NAME: u32 = 5;
}

/// `TrackEvent`.
pub(super) mod event {
    pub(in super::super) const DEBUG_ANNOTATIONS: u32 = 4;
    pub(in super::super) const TYPE: u32 = 9;
    pub(in super::super) const TRACK_UUID: u32 = 11;
    pub(in super::super) const CATEGORIES: u32 = 22;
    pub(in super::super) const NAME: u32 = 23;
    pub(in super::super) const FLOW_IDS: u32 = 47;
    pub(in super::super) const TERMINATING_FLOW_IDS: u32 = 48;

    /// `Type`.
    pub(in super::super) const SLICE_BEGIN: u64 = 1;
    pub(in super::super) const SLICE_END: u64 = 2;
    pub(in super::super) const INSTANT: u64 = 3;
}

/// `DebugAnnotation`.
pub(super) mod annotation {
    pub(in super::super) const BOOL_VALUE: u32 = 2;
    pub(in super::super) const UINT_VALUE: u32 = 3;
    pub(in super::super) const STRING_VALUE: u32 = 6;
    pub(in super::super) const POINTER_VALUE: u32 = 7;
    pub(in super::super) const NAME: u32 = 10;
}
