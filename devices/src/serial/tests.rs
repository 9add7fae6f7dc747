#![allow(clippy::unwrap_used)]

use std::io::{self, Write};
use std::sync::atomic::AtomicUsize;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use super::*;
use crate::signals::testing::Line as TestLine;

const DATA: u64 = 0;
const IER: u64 = 1;
const IIR: u64 = 2;
const FCR: u64 = 2;
const LCR: u64 = 3;
const MCR: u64 = 4;
const LSR: u64 = 5;
const MSR: u64 = 6;
const SCR: u64 = 7;

const IER_RX: u8 = 0x01;
const IER_TX: u8 = 0x02;
const LSR_DATA_READY: u8 = 0x01;
const LSR_TX_EMPTY: u8 = 0x60;
const IIR_NONE: u8 = 0x01;

/// A writer that is observed from outside, and whose pipe can be closed.
#[derive(Clone, Default)]
struct Screen(Arc<Mutex<ScreenState>>);

#[derive(Default)]
struct ScreenState {
    text: Vec<u8>,
    closed: bool,
}

impl Screen {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().text.clone()).unwrap()
    }
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.0.lock().unwrap();
        if state.closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        state.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Fixture {
    serial: Serial,
    line: Arc<TestLine>,
    screen: Screen,
}

fn fixture() -> Fixture {
    let (line, screen) = (Arc::new(TestLine::default()), Screen::default());
    let serial = Serial::new(line.clone(), ConsoleOutput::write_through(screen.clone()));
    Fixture {
        serial,
        line,
        screen,
    }
}

fn get(serial: &mut Serial, register: u64) -> u8 {
    let mut byte = [0];
    serial.read(register, &mut byte);
    byte[0]
}

fn put(serial: &mut Serial, register: u64, value: u8) {
    serial.write(register, &[value]);
}

/// The steps of `autoconfig` in Linux's 8250 driver that detect a 16550A.
#[test]
fn linux_recognises_a_16550a() {
    let Fixture {
        mut serial, line, ..
    } = fixture();
    // The interrupt enable register keeps its low four bits, and only those.
    put(&mut serial, IER, 0);
    assert_eq!(get(&mut serial, IER) & 0x0f, 0);
    put(&mut serial, IER, 0x0f);
    assert_eq!(get(&mut serial, IER), 0x0f);
    put(&mut serial, IER, 0);
    // In loopback the modem outputs come back as inputs: RTS and OUT2 as CTS and DCD.
    put(&mut serial, MCR, 0x10 | 0x0a);
    assert_eq!(get(&mut serial, MSR) & 0xf0, 0x90);
    put(&mut serial, MCR, 0);
    // FIFOs enabled: both top bits of the identification register.
    put(&mut serial, FCR, 0x01);
    assert_eq!(get(&mut serial, IIR) >> 6, 3);
    // The scratch register holds a byte; the divisor latch does not disturb it.
    put(&mut serial, SCR, 0xa5);
    put(&mut serial, LCR, 0x80);
    serial.write(DATA, &[0x01, 0x00]);
    assert_eq!([get(&mut serial, 0), get(&mut serial, 1)], [0x01, 0x00]);
    put(&mut serial, LCR, 0x03);
    assert_eq!(get(&mut serial, SCR), 0xa5);
    assert_eq!(get(&mut serial, LSR), LSR_TX_EMPTY);
    line.take();
}

/// `serial8250_do_startup` enables the transmitter interrupt twice, and must see it twice.
/// Otherwise the driver falls back to polling by timer.
#[test]
fn the_transmitter_interrupt_is_asserted_again_when_enabled_again() {
    let Fixture {
        mut serial, line, ..
    } = fixture();
    for _ in 0..2 {
        put(&mut serial, IER, IER_TX);
        assert_eq!(line.take(), 1);
        assert_eq!(get(&mut serial, IIR) & 0x0f, 0x02);
        assert_eq!(get(&mut serial, IIR) & 0x0f, IIR_NONE);
        put(&mut serial, IER, 0);
    }
}

/// Output by interrupts: each handled interrupt sends a full FIFO. Another interrupt comes as long
/// as something was sent.
#[test]
fn linux_prints_by_interrupts() {
    let Fixture {
        mut serial,
        line,
        screen,
    } = fixture();
    let text = "a line longer than the sixteen bytes of a FIFO\n";
    let mut chunks = text.as_bytes().chunks(16);
    put(&mut serial, IER, IER_TX);
    while line.take() > 0 {
        assert_eq!(get(&mut serial, IIR) & 0x0f, 0x02);
        assert_eq!(get(&mut serial, LSR) & LSR_TX_EMPTY, LSR_TX_EMPTY);
        match chunks.next() {
            Some(chunk) => chunk.iter().for_each(|&byte| put(&mut serial, DATA, byte)),
            None => put(&mut serial, IER, 0),
        }
    }
    assert_eq!(screen.text(), text);
}

#[test]
fn input_interrupts_and_is_read_in_order() {
    let Fixture {
        mut serial, line, ..
    } = fixture();
    put(&mut serial, IER, IER_RX);
    assert_eq!(line.take(), 0);
    assert_eq!(serial.push_input(b"ls\n"), 3);
    assert_eq!(line.take(), 1);
    assert_eq!(get(&mut serial, IIR) & 0x0f, 0x04);
    let mut read = Vec::new();
    while get(&mut serial, LSR) & LSR_DATA_READY != 0 {
        read.push(get(&mut serial, DATA));
    }
    assert_eq!(read, b"ls\n");
    assert_eq!(get(&mut serial, IIR) & 0x0f, IIR_NONE);
}

/// `serial8250_console_write` masks interrupts while it prints. Input that came meanwhile must
/// interrupt afterwards.
#[test]
fn input_during_masked_interrupts_is_not_forgotten() {
    let Fixture {
        mut serial, line, ..
    } = fixture();
    put(&mut serial, IER, 0);
    serial.push_input(b"x");
    assert_eq!(line.take(), 0);
    put(&mut serial, IER, IER_RX);
    assert_eq!(line.take(), 1);
}

#[test]
fn a_long_input_waits_for_room() {
    let Fixture { mut serial, .. } = fixture();
    let rooms = Arc::new(AtomicUsize::new(0));
    let seen = rooms.clone();
    serial.on_input_room(move || {
        seen.fetch_add(1, Ordering::Relaxed);
    });
    let input: Vec<u8> = (0..150).collect();
    assert_eq!(serial.input_room(), 64);
    let mut sent = serial.push_input(&input);
    assert_eq!((sent, serial.input_room()), (64, 0));
    assert_eq!(
        serial.push_input(&input[sent..]),
        0,
        "a full FIFO takes nothing"
    );
    let mut read = Vec::new();
    while get(&mut serial, LSR) & LSR_DATA_READY != 0 {
        read.push(get(&mut serial, DATA));
        if rooms.swap(0, Ordering::Relaxed) > 0 {
            sent += serial.push_input(&input[sent..]);
        }
    }
    assert_eq!(read, input);
    assert_eq!(
        rooms.load(Ordering::Relaxed),
        0,
        "nobody waits after the last push"
    );
}

/// Linux's handler leaves when nothing is pending, and reads 256 bytes at most between checks.
#[test]
fn what_comes_while_the_guest_reads_is_not_forgotten() {
    const MOST: usize = 256;
    let Fixture {
        mut serial, line, ..
    } = fixture();
    put(&mut serial, IER, IER_RX);
    let input: Vec<u8> = (0..=255).cycle().take(2 * MOST + 40).collect();
    let mut sent = serial.push_input(&input);
    let mut read = Vec::new();
    while line.take() > 0 {
        while get(&mut serial, IIR) & IIR_NONE == 0 {
            let end = read.len() + MOST;
            while get(&mut serial, LSR) & LSR_DATA_READY != 0 && read.len() < end {
                read.push(get(&mut serial, DATA));
                sent += serial.push_input(&input[sent..]);
            }
        }
    }
    assert_eq!(read, input);
    assert_eq!(get(&mut serial, IIR) & 0x0f, IIR_NONE);
    // A guest that has disabled data interrupts gets none.
    put(&mut serial, IER, 0);
    serial.push_input(b"x");
    assert_eq!(get(&mut serial, IIR) & 0x0f, IIR_NONE);
}

#[test]
fn nothing_is_received_in_loopback() {
    let Fixture {
        mut serial, screen, ..
    } = fixture();
    let rooms = Arc::new(AtomicUsize::new(0));
    let seen = rooms.clone();
    serial.on_input_room(move || {
        seen.fetch_add(1, Ordering::Relaxed);
    });
    put(&mut serial, MCR, 0x10);
    assert_eq!((serial.input_room(), serial.push_input(b"abc")), (0, 0));
    put(&mut serial, DATA, b'z');
    assert_eq!(get(&mut serial, DATA), b'z');
    assert_eq!(screen.text(), "");
    assert_eq!(rooms.load(Ordering::Relaxed), 0);
    put(&mut serial, MCR, 0);
    assert_eq!(rooms.load(Ordering::Relaxed), 1, "the pusher may try again");
    assert_eq!(serial.push_input(b"abc"), 3);
}

#[test]
fn a_closed_pipe_is_counted_and_nothing_more() {
    let Fixture {
        mut serial,
        line,
        screen,
    } = fixture();
    put(&mut serial, IER, IER_TX);
    line.take();
    get(&mut serial, IIR);
    screen.0.lock().unwrap().closed = true;
    for byte in *b"gone" {
        put(&mut serial, DATA, byte);
    }
    assert_eq!(line.take(), 1, "the guest's transmitter goes on");
    assert_eq!(serial.stats().output_lost, 4);
    screen.0.lock().unwrap().closed = false;
    put(&mut serial, DATA, b'!');
    assert_eq!(screen.text(), "!");
}

#[test]
fn a_lost_interrupt_is_counted() {
    let Fixture {
        mut serial, line, ..
    } = fixture();
    line.broken.store(true, Ordering::Relaxed);
    put(&mut serial, IER, IER_RX);
    assert_eq!(serial.push_input(b"a"), 1);
    assert_eq!(get(&mut serial, DATA), b'a');
    assert_eq!(serial.stats().interrupts_lost, 1);
}

/// The maximum wait for a step that takes no time on an idle host.
const LIMIT: Duration = Duration::from_secs(60);

/// A backend that accepts nothing until it is opened, and then reports the pieces in which its
/// bytes came.
#[derive(Clone, Default)]
struct Gate(Arc<GateState>);

#[derive(Default)]
struct GateState {
    is_open: Mutex<bool>,
    opened: Condvar,
    pieces: Mutex<Vec<String>>,
}

impl Gate {
    fn open(&self) {
        *self.0.is_open.lock().unwrap() = true;
        self.0.opened.notify_all();
    }

    fn pieces(&self) -> Vec<String> {
        self.0.pieces.lock().unwrap().clone()
    }
}

impl std::io::Write for Gate {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let is_open = self.0.is_open.lock().unwrap();
        drop(self.0.opened.wait_while(is_open, |open| !*open).unwrap());
        let piece = String::from_utf8_lossy(bytes).into_owned();
        self.0.pieces.lock().unwrap().push(piece);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_line_is_written_whole_and_a_prompt_at_once() {
    for (promptness, expected) in [
        (Promptness::Bytes, vec!["$", " ", "\n", "end"]),
        (Promptness::Lines, vec!["$ \n", "end"]),
    ] {
        let screen = Gate::default();
        screen.open();
        let output = ConsoleOutput::queued(screen.clone(), promptness).unwrap();
        let backlog = output.backlog().unwrap();
        let mut serial = Serial::new(Arc::new(TestLine::default()), output);
        for byte in *b"$ \n" {
            put(&mut serial, DATA, byte);
            if promptness == Promptness::Bytes {
                assert!(backlog.settle(LIMIT));
            }
        }
        assert!(backlog.settle(LIMIT));
        for byte in *b"end" {
            put(&mut serial, DATA, byte);
        }
        drop(serial);
        let pieces = screen.pieces();
        let told = pieces.concat();
        assert_eq!(told, "$ \nend");
        // Bytes that come together may be written together.
        assert_eq!(pieces[..expected.len() - 1], expected[..expected.len() - 1]);
    }
}

#[test]
fn a_far_end_that_stands_still_holds_nobody_up_and_is_told_to_who_waits() {
    let screen = Gate::default();
    let seen = Arc::new(AtomicU64::new(0));
    let count = seen.clone();
    let mut output = ConsoleOutput::queued(screen.clone(), Promptness::Bytes)
        .unwrap()
        .observed_by(move |bytes| {
            count.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        });
    let backlog = output.backlog().unwrap();
    let (told, room) = std::sync::mpsc::channel();
    backlog.on_room(move || told.send(()).unwrap());
    let piece = [b'x'; 1024];
    for _ in 0..64 {
        assert!(!backlog.is_full());
        output.write_all(&piece).unwrap();
    }
    assert!(backlog.is_full());
    // A writer that does not wait loses the excess.
    for _ in 0..4096 {
        output.write_all(&piece).unwrap();
    }
    let lost = output.lost();
    assert_eq!(seen.load(Ordering::Relaxed), (64 + 4096) * 1024);
    // 1 MiB is queued, and at most as much is being written.
    assert!(lost >= 2 << 20, "{lost}");
    screen.open();
    room.recv().unwrap();
    assert!(!backlog.is_full());
    drop(output);
    let written = screen.pieces().concat().len() as u64;
    assert_eq!(written + lost, (64 + 4096) * 1024);
}

#[test]
fn the_end_does_not_wait_for_a_far_end_that_takes_nothing() {
    let screen = Gate::default();
    let mut output = ConsoleOutput::queued(screen.clone(), Promptness::Bytes).unwrap();
    output.write_all(b"nobody reads").unwrap();
    drop(output);
    assert_eq!(screen.pieces(), [""; 0]);
    screen.open();
}

#[test]
fn a_restored_port_goes_on_where_the_saved_one_stopped() {
    let mut saved = fixture();
    put(&mut saved.serial, LCR, 0x83);
    saved.serial.write(DATA, &[0x34, 0x12]);
    put(&mut saved.serial, LCR, 0x03);
    put(&mut saved.serial, SCR, 0x77);
    put(&mut saved.serial, MCR, 0x0b);
    put(&mut saved.serial, IER, IER_RX);
    saved.serial.push_input(b"pending");
    let state = saved.serial.state();
    assert_eq!((state.divisor, state.scratch), (0x1234, 0x77));
    assert_eq!(state.input, b"pending");

    let mut restored = fixture();
    restored.serial.restore(&state).unwrap();
    assert_eq!(restored.serial.state(), state);
    assert_eq!(
        restored.line.take(),
        1,
        "the pending interrupt is raised again"
    );
    let mut read = [0; 7];
    for byte in &mut read {
        *byte = get(&mut restored.serial, DATA);
    }
    assert_eq!(&read, b"pending");
    put(&mut restored.serial, DATA, b'o');
    assert_eq!(restored.screen.text(), "o", "the output is still connected");
}

#[test]
fn an_overlong_fifo_is_refused() {
    let Fixture {
        mut serial, screen, ..
    } = fixture();
    let before = serial.state();
    let state = SerialState {
        input: vec![0; 65],
        ..before.clone()
    };
    let error = serial.restore(&state).unwrap_err();
    assert!(error.to_string().contains("65 bytes"), "{error}");
    assert_eq!(serial.state(), before);
    put(&mut serial, DATA, b'k');
    assert_eq!(screen.text(), "k");
}
