#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use super::*;

const MEMORY: CmosMemory = CmosMemory {
    below_4g_end: 192 * MIB,
    above_4g: 0,
};

fn at(seconds: u64) -> Cmos {
    Cmos::new(MEMORY, move || UNIX_EPOCH + Duration::from_secs(seconds))
}

/// Reads a register like CMOS_READ of Linux: index to 0x70, data by 0x71. CMOS_WRITE is the same
/// for writes.
fn get(cmos: &mut Cmos, register: u8) -> u8 {
    cmos.write(INDEX, &[register]);
    let mut byte = [0];
    cmos.read(DATA, &mut byte);
    byte[0]
}

fn put(cmos: &mut Cmos, register: u8, value: u8) {
    cmos.write(INDEX, &[register]);
    cmos.write(DATA, &[value]);
}

fn shown(cmos: &mut Cmos) -> [u8; 8] {
    [
        CENTURY,
        YEAR,
        MONTH,
        DAY_OF_MONTH,
        HOURS,
        MINUTES,
        SECONDS,
        DAY_OF_WEEK,
    ]
    .map(|register| get(cmos, register))
}

#[test]
fn the_clock_shows_the_date() {
    // (seconds since 1970 from date(1), BCD: century year month day hour minute second, weekday)
    let cases: [(u64, [u8; 8]); 12] = [
        (0, [0x19, 0x70, 0x01, 0x01, 0x00, 0x00, 0x00, 5]),
        (68_169_599, [0x19, 0x72, 0x02, 0x28, 0x23, 0x59, 0x59, 2]),
        (68_169_600, [0x19, 0x72, 0x02, 0x29, 0x00, 0x00, 0x00, 3]),
        (946_684_799, [0x19, 0x99, 0x12, 0x31, 0x23, 0x59, 0x59, 6]),
        (951_782_400, [0x20, 0x00, 0x02, 0x29, 0x00, 0x00, 0x00, 3]),
        (951_868_800, [0x20, 0x00, 0x03, 0x01, 0x00, 0x00, 0x00, 4]),
        (1_709_210_096, [0x20, 0x24, 0x02, 0x29, 0x12, 0x34, 0x56, 5]),
        (1_735_689_599, [0x20, 0x24, 0x12, 0x31, 0x23, 0x59, 0x59, 3]),
        (1_772_323_200, [0x20, 0x26, 0x03, 0x01, 0x00, 0x00, 0x00, 1]),
        (4_107_542_399, [0x21, 0x00, 0x02, 0x28, 0x23, 0x59, 0x59, 1]),
        (4_107_542_400, [0x21, 0x00, 0x03, 0x01, 0x00, 0x00, 0x00, 2]),
        (u64::MAX >> 2, [0x99, 0x99, 0x12, 0x31, 0x23, 0x59, 0x59, 6]),
    ];
    for (seconds, expected) in cases {
        let found = shown(&mut at(seconds));
        assert_eq!(found, expected, "{seconds}: {found:x?}");
    }
}

#[test]
fn a_clock_before_1970_shows_1970() {
    let mut cmos = Cmos::new(MEMORY, || UNIX_EPOCH - Duration::from_secs(1));
    assert_eq!(get(&mut cmos, YEAR), 0x70);
}

/// `mc146818_avoid_UIP` and `cmos_do_probe`: valid RAM, no update in progress, 24 hours, BCD.
#[test]
fn linux_finds_a_working_clock() {
    let mut cmos = at(1_709_210_096);
    assert_eq!(get(&mut cmos, STATUS_D) & 0x7f, 0);
    assert_eq!(get(&mut cmos, STATUS_D) & 0x80, 0x80);
    assert_eq!(get(&mut cmos, STATUS_A) & UPDATE_IN_PROGRESS, 0);
    assert_eq!(get(&mut cmos, STATUS_B) & (HOURS_24 | BINARY), HOURS_24);
    assert_eq!(get(&mut cmos, STATUS_C), 0);
    // A guest that writes the bit itself is not made to wait.
    put(&mut cmos, STATUS_A, 0xff);
    assert_eq!(get(&mut cmos, STATUS_A), 0x7f);
}

#[test]
fn status_b_chooses_the_format() {
    // (status B, hour of the day, shown)
    let cases = [
        (HOURS_24, 23, 0x23),
        (HOURS_24 | BINARY, 23, 23),
        (0, 0, 0x12),
        (0, 11, 0x11),
        (0, 12, 0x92),
        (0, 23, 0x91),
        (BINARY, 23, 0x80 | 11),
    ];
    for (status, hour, expected) in cases {
        let mut cmos = at(hour * 3600);
        put(&mut cmos, STATUS_B, status);
        assert_eq!(get(&mut cmos, HOURS), expected, "{status:#x} {hour}");
    }
}

#[test]
fn time_runs_on_and_the_guest_cannot_set_it() {
    let seconds = Arc::new(AtomicU64::new(59));
    let clock = seconds.clone();
    let mut cmos = Cmos::new(MEMORY, move || {
        UNIX_EPOCH + Duration::from_secs(clock.load(Ordering::Relaxed))
    });
    assert_eq!(get(&mut cmos, SECONDS), 0x59);
    put(&mut cmos, SECONDS, 0x11);
    assert_eq!(get(&mut cmos, SECONDS), 0x59);
    seconds.store(60, Ordering::Relaxed);
    assert_eq!(
        [get(&mut cmos, SECONDS), get(&mut cmos, MINUTES)],
        [0x00, 0x01]
    );
}

#[test]
fn memory_sizes_stand_where_firmware_puts_them() {
    let word =
        |cmos: &mut Cmos, low: u8| u64::from(get(cmos, low)) | u64::from(get(cmos, low + 1)) << 8;
    // (end below 4 GiB, above; KiB from 1 MiB, 64 KiB units from 16 MiB, 64 KiB units from 4 GiB)
    let cases = [
        (32 * MIB, 0, 31 * 1024, 256, 0),
        (192 * MIB, 0, 0xffff, 2816, 0),
        (3072 * MIB, 2048 * MIB, 0xffff, 48_896, 32_768),
        (GIB_4 * 2, u64::MAX, 0xffff, 65_280, 0xff_ffff),
        (MIB, 0, 0, 0, 0),
    ];
    for (below_4g_end, above_4g, kib, units, high) in cases {
        let memory = CmosMemory {
            below_4g_end,
            above_4g,
        };
        let mut cmos = Cmos::new(memory, || UNIX_EPOCH);
        assert_eq!(word(&mut cmos, 0x15), 640);
        assert_eq!(word(&mut cmos, 0x17), kib, "{memory:?}");
        assert_eq!(word(&mut cmos, 0x30), kib, "{memory:?}");
        assert_eq!(word(&mut cmos, 0x34), units, "{memory:?}");
        let top = u64::from(get(&mut cmos, 0x5d)) << 16;
        assert_eq!(word(&mut cmos, 0x5b) | top, high, "{memory:?}");
    }
}

#[test]
fn the_nmi_bit_of_the_index_selects_nothing() {
    let mut cmos = at(7);
    assert_eq!(get(&mut cmos, 0x80 | SECONDS), 0x07);
    // One word write sets index and data, as `outw` does.
    cmos.write(INDEX, &[0x8f, 0x0a]);
    assert_eq!(
        get(&mut cmos, 0x0f),
        0x0a,
        "shutdown status keeps its value"
    );
}

#[test]
fn a_restored_chip_answers_as_the_saved_one() {
    let mut saved = at(5);
    put(&mut saved, 0x0f, 0x0a);
    put(&mut saved, STATUS_B, HOURS_24 | BINARY);
    cmos_select(&mut saved, 0x0f);
    let mut restored = at(3600 * 13);
    restored.restore(&saved.state()).unwrap();
    let mut byte = [0];
    restored.read(DATA, &mut byte);
    assert_eq!(byte, [0x0a], "the selected byte is kept");
    assert_eq!(
        get(&mut restored, HOURS),
        13,
        "the format is kept, the time is now's"
    );

    let short = CmosState {
        index: 0,
        ram: vec![0; 64],
    };
    let error = restored.restore(&short).unwrap_err();
    assert!(error.to_string().contains("64 bytes"), "{error}");
    assert_eq!(get(&mut restored, HOURS), 13);
}

fn cmos_select(cmos: &mut Cmos, register: u8) {
    cmos.write(INDEX, &[register]);
}
