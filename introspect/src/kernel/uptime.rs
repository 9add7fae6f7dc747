//! The time that a system is up: the numbers of `/proc/uptime`.
//!
//! They are those of the last tick: what passed since then is not known without the CPU's counter.

use std::fmt;
use std::time::Duration;

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::per_cpu::PerCpuTable;
use super::symbols::Symbols;
use crate::x86_64::ReadVirtualError;
use crate::{Gva, MemoryView};

/// The offset of the timekeeper in `tk_core`, which has no type in BTF: behind a sequence count
/// (kernel/time/timekeeping.c).
const TIMEKEEPER: u64 = 8;
/// The place of the idle time among a CPU's times (`CPUTIME_IDLE`, include/linux/kernel_stat.h).
const IDLE: u64 = 5;

/// The time that a system is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Uptime {
    /// The time since the kernel started, that of suspension included.
    pub since_boot: Duration,
    /// The time that all CPUs had nothing to do.
    pub idle: Duration,
}

impl fmt::Display for Uptime {
    /// Writes the line of `/proc/uptime`, without its newline.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hundredths = |time: &Duration| time.subsec_nanos() / 10_000_000;
        write!(
            f,
            "{}.{:02} {}.{:02}",
            self.since_boot.as_secs(),
            hundredths(&self.since_boot),
            self.idle.as_secs(),
            hundredths(&self.idle)
        )
    }
}

/// The location of the times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UptimeLayout {
    /// The address of the kernel's `timekeeper`.
    timekeeper: Gva,
    /// Offsets in it.
    base: u64,
    fraction: u64,
    shift: u64,
    suspended: u64,
    /// The per-CPU address of the idle time, in nanoseconds.
    idle: u64,
    cpus: PerCpuTable,
}

impl UptimeLayout {
    /// Looks up the places. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel's types or symbols do not describe them.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, LayoutError> {
        let symbol = |name| {
            symbols.address_of(name).ok_or(LayoutError::Symbol {
                name,
                used_for: "tells how long it is up",
            })
        };
        // The structure has a name from Linux 6.13 on.
        let inside = offset_of_timekeeper(btf);
        let times = offset_of_times(btf)?;
        Ok(Self {
            timekeeper: Gva(symbol("tk_core")?.wrapping_add(inside)),
            base: offset(btf, "timekeeper.tkr_mono.base", 8)?,
            fraction: offset(btf, "timekeeper.tkr_mono.xtime_nsec", 8)?,
            shift: offset(btf, "timekeeper.tkr_mono.shift", 4)?,
            suspended: offset(btf, "timekeeper.offs_boot", 8)?,
            idle: symbol("kernel_cpustat")?.wrapping_add(times + 8 * IDLE),
            cpus: PerCpuTable::new(symbols)?,
        })
    }

    /// Reads the times.
    ///
    /// # Errors
    /// If one of the numbers cannot be read.
    pub fn read(&self, view: MemoryView<'_>) -> Result<Uptime, ReadVirtualError> {
        let word = |at: u64| view.u64(Gva(self.timekeeper.0.wrapping_add(at)));
        let shift = view.u32(Gva(self.timekeeper.0.wrapping_add(self.shift)))?;
        let fraction = word(self.fraction)?.checked_shr(shift).unwrap_or(0);
        let since_boot = word(self.base)?
            .wrapping_add(fraction)
            .wrapping_add(word(self.suspended)?);
        let mut idle = 0u64;
        for base in self.cpus.bases(view)? {
            idle = idle.saturating_add(view.u64(Gva(base?.wrapping_add(self.idle)))?);
        }
        Ok(Uptime {
            since_boot: Duration::from_nanos(since_boot),
            idle: Duration::from_nanos(idle),
        })
    }
}

fn offset_of_timekeeper(btf: &Btf) -> u64 {
    let member = btf.member("tk_data.timekeeper");
    member.map_or(TIMEKEEPER, |member| member.byte_offset)
}

fn offset_of_times(btf: &Btf) -> Result<u64, LayoutError> {
    Ok(btf.member("kernel_cpustat.cpustat")?.byte_offset)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::test_kernel::{
        BASE, HALF, Member, Struct, TestKernel, WILD, WORD, symbols, types,
    };

    const CORE: u64 = BASE;
    const OFFSETS: u64 = BASE + 0x300;
    const CPUS: u64 = BASE + 0x400;
    const DATA: [u64; 2] = [BASE + 0x1000, BASE + 0x2000];
    const TIMES: u64 = 0x80;

    const STRUCTS: &[Struct<'static>] = &[
        (
            "tk_read_base",
            &[
                ("shift", 0x1c, HALF),
                ("xtime_nsec", 0x20, WORD),
                ("base", 0x28, WORD),
            ],
        ),
        (
            "timekeeper",
            &[
                ("tkr_mono", 0, Member::Of("tk_read_base")),
                ("offs_boot", 0x98, WORD),
            ],
        ),
        ("kernel_cpustat", &[("cpustat", 0, WORD)]),
    ];

    fn names(cpus: u64) -> Symbols {
        symbols(&[
            ("tk_core", CORE),
            ("kernel_cpustat", TIMES),
            ("__per_cpu_offset", OFFSETS),
            ("nr_cpu_ids", cpus),
        ])
    }

    #[test]
    fn the_times_are_those_of_proc() {
        let layout = UptimeLayout::new(&types(STRUCTS), &names(CPUS)).unwrap();
        let mut kernel = TestKernel::default();
        kernel.words(OFFSETS, &DATA);
        // 5.00 s, 1 s behind the tick, and 2.25 s of suspension.
        kernel.put_all(&[
            (CORE + 8 + 0x1c, 4, 4),
            (CORE + 8 + 0x20, 1_000_000_000 << 4, 8),
            (CORE + 8 + 0x28, 5_000_000_000, 8),
            (CORE + 8 + 0x98, 2_250_000_000, 8),
            (CPUS, 2, 4),
            (DATA[0] + TIMES + 40, 1_019_999_999, 8),
            (DATA[1] + TIMES + 40, 3_000_000_000, 8),
        ]);
        let paused = PausedMemory::new(&kernel.memory);
        let uptime = layout.read(kernel.view(&paused)).unwrap();
        assert_eq!(uptime.to_string(), "8.25 4.01");
    }

    #[test]
    fn numbers_that_are_not_there_are_an_error() {
        let types = types(STRUCTS);
        let kernel = TestKernel::default();
        let paused = PausedMemory::new(&kernel.memory);
        let layout = UptimeLayout::new(&types, &names(WILD)).unwrap();
        let error = layout.read(kernel.view(&paused)).unwrap_err();
        assert!(error.to_string().contains("not mapped"), "{error}");
        let error = UptimeLayout::new(&types, &symbols(&[])).unwrap_err();
        assert!(error.to_string().contains("tk_core"), "{error}");
    }
}
