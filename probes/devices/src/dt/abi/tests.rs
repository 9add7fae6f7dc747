//! Tests of every member of every structure, at its offset.
#![allow(clippy::unwrap_used)]

use super::*;

/// Checks the fields at their offsets, and that every other byte is 0.
fn assert_bytes(found: &[u8], size: usize, fields: &[(usize, Vec<u8>)]) {
    assert_eq!(found.len(), size);
    let mut expected = vec![0; size];
    for (at, field) in fields {
        expected[*at..at + field.len()].copy_from_slice(field);
    }
    let differs = expected.iter().zip(found).position(|(a, b)| a != b);
    assert_eq!(differs, None, "first byte that differs");
}

fn words(values: impl IntoIterator<Item = u64>) -> Vec<u8> {
    values.into_iter().flat_map(u64::to_le_bytes).collect()
}

fn example(values: Values) -> EventFields {
    EventFields {
        probe: 0x0102_0304,
        cpu: 0x1112_1314,
        pid: 0x2122_2324,
        tid: 0x3132_3334,
        time: Duration::new(0x4142_4344_4546, 999_999_999),
        // One frame more than there is room for.
        kernel_stack: (0xffff_ffff_8100_0000..0xffff_ffff_8100_0014).collect(),
        user_stack: vec![0x40_1000, 0x40_2000],
        comm: b"a-name-of-more-than-23-bytes".to_vec(),
        values,
    }
}

fn start() -> Vec<(usize, Vec<u8>)> {
    vec![
        (0, 0x0102_0304u32.to_le_bytes().to_vec()),
        (4, 0x1112_1314u32.to_le_bytes().to_vec()),
        (8, 0x2122_2324u32.to_le_bytes().to_vec()),
        (12, 0x3132_3334u32.to_le_bytes().to_vec()),
        (16, words([0x4142_4344_4546, 999_999_999])),
        (32, words([19])),
        (40, words(0xffff_ffff_8100_0000..0xffff_ffff_8100_0013)),
    ]
}

#[test]
fn events_of_both_layouts_have_every_member_in_its_place() {
    let arguments = [-1, 2, 3, 4, 5, 6, 7, 8, 9, i64::MIN];
    let argument_bytes = words(arguments.map(i64::cast_unsigned));
    let returned = Values::Return {
        values: [-1, 7],
        error: 13,
    };
    let returned_bytes = [words([u64::MAX, 7]), 13i32.to_le_bytes().to_vec()].concat();
    for (values, bytes) in [
        (Values::Arguments(arguments), argument_bytes),
        (returned, returned_bytes),
    ] {
        let event = example(values);
        let mut fields = start();
        fields.push((192, words([2, 0x40_1000, 0x40_2000])));
        fields.push((352, b"a-name-of-more-than-23-".to_vec()));
        fields.push((376, bytes.clone()));
        assert_bytes(&Abi::Current.event(&event), 456, &fields);
        let mut fields = start();
        fields.push((192, b"a-name-of-more-than-23-".to_vec()));
        fields.push((216, bytes));
        assert_bytes(&Abi::Old.event(&event), 296, &fields);
    }
}

#[test]
fn what_is_written_reads_back_as_far_as_there_was_room() {
    let arguments = Values::Arguments([-1, 2, 3, 4, 5, 6, 7, 8, 9, i64::MIN]);
    let event = example(arguments);
    for (abi, user_stack) in [
        (Abi::Old, Vec::new()),
        (Abi::Current, event.user_stack.clone()),
    ] {
        let bytes = abi.event(&event);
        let expected = EventFields {
            kernel_stack: event.kernel_stack[..MAX_FRAMES].to_vec(),
            user_stack,
            comm: event.comm[..COMM_SIZE - 1].to_vec(),
            ..event.clone()
        };
        assert_eq!(abi.read_event(&bytes), Some(expected));
        assert_eq!(abi.read_event(&bytes[1..]), None);
        // Any bytes from a client.
        let noise = abi.read_event(&vec![0xff; abi.event_size()]).unwrap();
        assert_eq!(noise.time, Duration::MAX);
        assert_eq!(noise.kernel_stack, [u64::MAX; MAX_FRAMES]);
        let request = abi.probe_request(&abi.request(7, FLAG_EXECNAME)).unwrap();
        assert_eq!((request.probe, request.flags), (7, FLAG_EXECNAME));
        assert_eq!(request.filter, Filter::default());
    }
    let counts = Counts {
        read: 1,
        dropped: 2,
        skipped: 3,
        recursive: 4,
    };
    let bytes = Abi::Current.stat(&counts);
    assert_eq!(Abi::Current.read_stat(&bytes), counts);
    let fewer = Counts {
        skipped: 0,
        recursive: 0,
        ..counts
    };
    assert_eq!(Abi::Old.read_stat(&bytes), fewer);
    let info = probe_info(&ProbeInfo {
        probe: 5,
        arguments: 6,
        provider: "tracepoint",
        function: "a_function_of_a_long_name",
        name: "",
    });
    let names = [&b"tracepoint"[..], b"a_function_of_a", b""];
    assert_eq!(listed_names(&info), Some((5, names)));
    assert_eq!(listed_names(&info[..3]), None);
}

#[test]
fn what_was_not_asked_for_reads_as_zeros() {
    let event = EventFields {
        probe: 1,
        cpu: 0,
        pid: 0,
        tid: 0,
        time: Duration::ZERO,
        kernel_stack: Vec::new(),
        user_stack: Vec::new(),
        comm: Vec::new(),
        values: Values::Arguments([0; MAX_EVENT_ARGUMENTS]),
    };
    for abi in [Abi::Old, Abi::Current] {
        assert_bytes(&abi.event(&event), abi.event_size(), &[(0, vec![1])]);
    }
}

#[test]
fn a_probe_is_described_in_56_bytes() {
    let info = ProbeInfo {
        probe: 0xa1b2_c3d4,
        arguments: 5,
        provider: "tracepoint",
        function: "a_function_of_a_long_name",
        name: "fifteen_bytes_x",
    };
    assert_bytes(
        &probe_info(&info),
        56,
        &[
            (0, 0xa1b2_c3d4u32.to_le_bytes().to_vec()),
            (4, vec![5]),
            (5, b"tracepoint".to_vec()),
            (21, b"a_function_of_a".to_vec()),
            (37, b"fifteen_bytes_x".to_vec()),
        ],
    );
}

#[test]
fn an_argument_is_described_in_24_bytes() {
    assert_bytes(
        &argument_info(7, 3, "struct pt_regs *regs"),
        24,
        &[(0, vec![7, 0, 0, 0, 3]), (5, b"struct pt_regs ".to_vec())],
    );
}

#[test]
fn counts_are_two_words_or_four() {
    let counts = Counts {
        read: 1,
        dropped: 2,
        skipped: 3,
        recursive: 4,
    };
    assert_eq!(Abi::Old.stat(&counts), words([1, 2]));
    assert_eq!(Abi::Current.stat(&counts), words([1, 2, 3, 4]));
}

#[test]
fn requests_are_read_from_their_places() {
    // Each byte is its own offset.
    let bytes: Vec<u8> = (0..40).collect();
    let word = |at: u8| u32::from_le_bytes([at, at + 1, at + 2, at + 3]);
    let long = |at: u8| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    assert_eq!(
        Abi::Old.probe_request(&bytes[..32]).unwrap(),
        ProbeRequest {
            probe: word(0),
            filter: Filter {
                operand: word(4),
                variable: word(8),
                value: word(12),
            },
            pace: TimerRate::Rate(word(16)),
            flags: long(24),
        }
    );
    assert_eq!(
        Abi::Current.probe_request(&bytes[..24]).unwrap(),
        ProbeRequest {
            probe: word(0),
            filter: Filter::default(),
            pace: TimerRate::Period(long(16)),
            flags: long(8),
        }
    );
    assert_eq!(Abi::Old.probe_request(&bytes[..31]), None);
    assert_eq!(Abi::Current.probe_request(&bytes[..23]), None);
    assert_eq!(list_size(&bytes[..16]), Some(long(0)));
    assert_eq!(arguments_request(&bytes[..24]), Some((word(0), long(8))));
    let expected = (word(0).cast_signed(), long(8));
    assert_eq!(resolve_request(&bytes), Some(expected));
}

#[test]
fn answers_are_written_into_the_clients_structure() {
    let mut list = [0xee; LIST_SIZE];
    set_list_size(&mut list, 0x1122);
    assert_eq!(list[..8], 0x1122u64.to_le_bytes());
    assert_eq!(list[8..], [0xee; 8], "the pointer stays");
    let mut arguments = [0xee; ARGUMENTS_SIZE];
    set_arguments_size(&mut arguments, 48);
    assert_eq!(arguments[8..16], 48u64.to_le_bytes());
    assert_eq!((arguments[0], arguments[16]), (0xee, 0xee));
    let mut found = [0xee; RESOLVE_SIZE];
    set_resolved(&mut found, 0x40_0000, 0x1000, 77);
    assert_eq!(found[..4], [0xee; 4], "the process stays");
    assert_eq!(found[4..8], (-1i32).to_le_bytes());
    assert_eq!(found[8..16], [0xee; 8], "the address stays");
    assert_eq!(found[16..], words([0x1000, 0x40_0000, 77]));
}
