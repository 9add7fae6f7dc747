//! A guest that accesses the serial port, the keyboard controller, the clock and the reset register
//! by any port and width. Meanwhile the host sends input, and the devices are saved, damaged and
//! restored.
//!
//! The input is a list of moves. Failures are a panic, registers that a snapshot does not keep and
//! lost input. So are an invalid value of the clock and a reset without a request.
#![no_main]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use devices::{
    Bus, CMOS_BASE, CMOS_LENGTH, COM1_BASE, Cmos, CmosMemory, ConsoleOutput, I8042, I8042_BASE,
    I8042_LENGTH, InterruptLine, MachineSignals, RESET_PORT_BASE, RESET_PORT_LENGTH, ResetCause,
    ResetPort, Serial, SharedDevice, UART_LENGTH,
};
use hostile::Input;
use libfuzzer_sys::fuzz_target;

/// The maximum number of moves of one run.
const MOST: usize = 500;
/// The maximum width of an access in bytes. String instructions are split before the bus.
const WIDEST: usize = 8;

/// An interrupt controller that fails now and then.
#[derive(Default)]
struct Line(AtomicU64);

impl InterruptLine for Line {
    fn pulse(&self) -> io::Result<()> {
        match self.0.fetch_add(1, Ordering::Relaxed) % 3 {
            2 => Err(io::ErrorKind::Other.into()),
            _ => Ok(()),
        }
    }
}

#[derive(Default)]
struct Resets(AtomicU64);

impl MachineSignals for Resets {
    fn request_reset(&self, _: ResetCause) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn request_power_off(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Machine {
    bus: Bus,
    serial: Arc<Mutex<Serial>>,
    cmos: Arc<Mutex<Cmos>>,
    reset_port: Arc<Mutex<ResetPort>>,
    resets: Arc<Resets>,
    time: Arc<AtomicU64>,
}

fn lock<T: ?Sized>(device: &Mutex<T>) -> MutexGuard<'_, T> {
    device.lock().expect("nobody panicked")
}

impl Machine {
    fn new() -> Self {
        let resets = Arc::<Resets>::default();
        let time = Arc::<AtomicU64>::default();
        let clock = time.clone();
        let now = move || -> SystemTime {
            UNIX_EPOCH + Duration::from_secs(clock.load(Ordering::Relaxed))
        };
        let memory = CmosMemory {
            below_4g_end: 3 << 30,
            above_4g: 1 << 40,
        };
        let serial = Serial::new(Arc::<Line>::default(), ConsoleOutput::null());
        let machine = Self {
            bus: Bus::new(),
            serial: Arc::new(Mutex::new(serial)),
            cmos: Arc::new(Mutex::new(Cmos::new(memory, now))),
            reset_port: Arc::new(Mutex::new(ResetPort::new(resets.clone()))),
            resets: resets.clone(),
            time,
        };
        let mut bus = Bus::new();
        let i8042: SharedDevice = Arc::new(Mutex::new(I8042::new(resets)));
        let devices: [(&'static str, u64, u64, SharedDevice); 4] = [
            ("serial", COM1_BASE, UART_LENGTH, machine.serial.clone()),
            ("i8042", I8042_BASE, I8042_LENGTH, i8042),
            ("cmos", CMOS_BASE, CMOS_LENGTH, machine.cmos.clone()),
            (
                "reset",
                RESET_PORT_BASE,
                RESET_PORT_LENGTH,
                machine.reset_port.clone(),
            ),
        ];
        for (name, base, length, device) in devices {
            bus.insert(name, base, length, device).expect("room");
        }
        Self { bus, ..machine }
    }

    /// Checks that each device is the same after it is saved and restored.
    fn check_saved(&self) {
        let (mut serial, mut cmos) = (lock(&self.serial), lock(&self.cmos));
        let (saved, memory) = (serial.state(), cmos.state());
        serial.restore(&saved).expect("a good state");
        cmos.restore(&memory).expect("a good state");
        assert_eq!(cmos.state(), memory);
        let now = serial.state();
        // Pending interrupts are raised again.
        let saved = devices::SerialState {
            interrupt_identification: now.interrupt_identification,
            ..saved
        };
        assert_eq!(now, saved);
        let mut reset_port = lock(&self.reset_port);
        let saved = reset_port.state();
        reset_port.restore(&saved);
        assert_eq!(reset_port.state(), saved);
    }
}

/// Reads a port of a device, beside one, or any.
fn port(input: &mut Input) -> u64 {
    let which = input.byte();
    let near = u64::from(which >> 3) % 10;
    match which % 8 {
        0..3 => COM1_BASE + near - 1,
        3 => I8042_BASE + near % 7 - 1,
        4 | 5 => CMOS_BASE + near % 2,
        6 => RESET_PORT_BASE + near % 3 - 1,
        _ => u64::from(input.short()),
    }
}

/// Damages some of the bytes of a state.
fn damage(bytes: &mut [u8], input: &mut Input) {
    for _ in 0..input.byte() % 6 {
        let at = usize::from(input.byte()) % bytes.len();
        bytes[at] = input.byte();
    }
}

fn make_move(machine: &Machine, input: &mut Input) {
    match input.byte() % 10 {
        0..3 => {
            let at = port(input);
            let width = 1 + usize::from(input.byte()) % WIDEST;
            let mut data = [0xee; WIDEST];
            let resets = machine.resets.0.load(Ordering::Relaxed);
            machine.bus.read(at, &mut data[..width]);
            assert_eq!(machine.resets.0.load(Ordering::Relaxed), resets, "a read");
        }
        3..6 => {
            let at = port(input);
            let width = 1 + usize::from(input.byte()) % WIDEST;
            let data: [u8; WIDEST] = input.bytes();
            machine.bus.write(at, &data[..width]);
        }
        6 => {
            let length = usize::from(input.byte());
            let mut serial = lock(&machine.serial);
            let room = serial.input_room();
            let taken = serial.push_input(&vec![b'x'; length]);
            assert_eq!(taken, length.min(room), "{length} bytes for {room}");
        }
        7 => {
            let time = u64::from_le_bytes(input.bytes());
            // Limited to the range of the host's clock.
            machine.time.store(time >> 2, Ordering::Relaxed);
            for index in 0..10 {
                machine.bus.write(CMOS_BASE, &[index]);
                machine.bus.read(CMOS_BASE + 1, &mut [0]);
            }
        }
        8 => {
            let mut serial = lock(&machine.serial);
            let mut bytes = postcard::to_stdvec(&serial.state()).expect("a state");
            damage(&mut bytes, input);
            if let Ok(state) = postcard::from_bytes(&bytes) {
                let _ = serial.restore(&state);
            }
        }
        _ => {
            let mut cmos = lock(&machine.cmos);
            let mut bytes = postcard::to_stdvec(&cmos.state()).expect("a state");
            damage(&mut bytes, input);
            if let Ok(state) = postcard::from_bytes(&bytes) {
                let _ = cmos.restore(&state);
            }
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let machine = Machine::new();
    for _ in 0..MOST {
        if input.0.is_empty() {
            break;
        }
        make_move(&machine, &mut input);
    }
    machine.check_saved();
    assert!(machine.bus.stats().unknown.len() <= 64);
});
