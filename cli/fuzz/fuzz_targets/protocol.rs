//! Fuzzes the bytes on a machine's sockets and in the run directory. They come from clients and,
//! for clients, from a machine that a guest has taken over.
//!
//! The first byte selects the protocol of the rest. A message that is understood is the same when
//! it is sent again. A length alone allocates no more than its bound. No control sequence of a
//! terminal is shown of an answer. (Trace output goes through a writer that ensures that, if it
//! goes to a terminal.)
#![no_main]

use std::alloc::System;

use cap::Cap;
use exotrace::hostile::{
    answer, dt_events, events, machine_name, port_answers, port_requests, process_of_lock,
    question, script_stream, trace_stream,
};
use libfuzzer_sys::fuzz_target;
use trace_devices::dt::Abi;
use trace_devices::dt::abi;
use trace_devices::dt::wire::{
    Call, HEADER_SIZE, MAX_ARGUMENT, OPEN_SIZE, decode_open, decode_request,
};

/// More at once ends the process: an answer about ports has 16 MiB at most, and text takes some
/// times its length.
#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, 256 << 20);

/// Checks that the message sent again equals the first.
fn check_again(line: &str, once: &str, again: Option<&str>) {
    assert_eq!(Some(once), again, "{line}");
}

/// Checks that there are no control characters but those between lines.
fn check_shown(text: &str) {
    let obeyed = text
        .chars()
        .find(|c| c.is_control() && !matches!(c, '\n' | '\t'));
    assert_eq!(obeyed, None, "{text:?}");
}

fn dt_requests(mut stream: &[u8]) {
    if let Some((open, rest)) = stream.split_first_chunk::<OPEN_SIZE>() {
        for privileged in [false, true] {
            let _ = decode_open(open, privileged);
        }
        stream = rest;
    }
    while let Some((header, rest)) = stream.split_first_chunk::<HEADER_SIZE>() {
        let Ok((code, length)) = decode_request(header) else {
            return;
        };
        assert!(length <= MAX_ARGUMENT, "{length}");
        let Some((argument, rest)) = rest.split_at_checked(length) else {
            return;
        };
        let _ = Call::decode(code, argument);
        for abi in [Abi::Old, Abi::Current] {
            let _ = abi.probe_request(argument);
        }
        let _ = (
            abi::arguments_request(argument),
            abi::resolve_request(argument),
        );
        stream = rest;
    }
}

fn dt_answers(bytes: &[u8]) {
    for info in bytes.chunks(abi::PROBE_INFO_SIZE) {
        let _ = abi::listed_names(info);
    }
    let _ = abi::list_size(bytes);
    for abi in [Abi::Old, Abi::Current] {
        let _ = (abi.read_event(bytes), abi.read_stat(bytes));
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, bytes)) = bytes.split_first() else {
        return;
    };
    let text = || String::from_utf8_lossy(bytes);
    match which % 10 {
        0 => {
            let line = text();
            if let Some(once) = question(&line) {
                check_again(&line, &once, question(&once).as_deref());
            }
        }
        1 => {
            let line = text();
            if let Some((once, shown)) = answer(&line) {
                let again = answer(&once).map(|(again, _)| again);
                check_again(&line, &once, again.as_deref());
                check_shown(&shown.unwrap_or_default());
            }
        }
        2 => {
            let (sent, known) = port_requests(bytes);
            assert_eq!(sent, bytes[..known]);
        }
        3 => assert!(port_answers(bytes) <= bytes.len()),
        4 => dt_requests(bytes),
        5 => {
            dt_answers(bytes);
            let text = dt_events(bytes, false).expect("a format");
            check_shown(&String::from_utf8_lossy(&text));
            let _ = dt_events(bytes, true);
        }
        6 => drop(trace_stream(bytes, which / 10)),
        7 => drop(script_stream(bytes)),
        8 => {
            let Some((&[format, hz], records)) = bytes.split_first_chunk() else {
                return;
            };
            let hz = 1 << (hz % 64);
            let _ = events(records, which >= 128, format, hz);
        }
        _ => {
            let line = text();
            if let Some(name) = machine_name(&line) {
                assert_eq!(name, line);
                assert!(!name.contains('/') && !name.starts_with('.') && !name.is_empty());
            }
            let process = process_of_lock(bytes);
            assert!(process.len() <= 20 && process.bytes().all(|b| b.is_ascii_digit()));
        }
    }
});
