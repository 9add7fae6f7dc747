//! The load of the system: the numbers of `/proc/loadavg`.

use std::fmt;

use super::btf::Btf;
use super::layout::{LayoutError, offset};
use super::per_cpu::PerCpuTable;
use super::symbols::Symbols;
use crate::x86_64::ReadVirtualError;
use crate::{Gva, MemoryView};

/// The number of bits behind the point of an average (`FSHIFT`, include/linux/sched/loadavg.h).
const FRACTION: u32 = 11;
/// Half of a hundredth, by which averages are rounded (`FIXED_1 / 200`, fs/proc/loadavg.c).
const ROUNDING: u64 = (1 << FRACTION) / 200;

/// The load of a system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// The averages over 1, 5 and 15 minutes, in units of 1/2048 of a task.
    pub averages: [u64; 3],
    /// The number of tasks that run or wait for a CPU.
    pub running: u64,
    /// The number of tasks.
    pub tasks: u32,
    /// The last pid that was given, in the initial pid namespace.
    pub last_pid: u32,
}

impl fmt::Display for Load {
    /// Writes the line of `/proc/loadavg`, without its newline.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for average in self.averages {
            let rounded = average.saturating_add(ROUNDING);
            let behind = rounded & ((1 << FRACTION) - 1);
            write!(
                f,
                "{}.{:02} ",
                rounded >> FRACTION,
                (behind * 100) >> FRACTION
            )?;
        }
        write!(f, "{}/{} {}", self.running, self.tasks, self.last_pid)
    }
}

/// The location of the load's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadLayout {
    averages: Gva,
    tasks: Gva,
    /// The cursor of the initial pid namespace, which is one above the last pid.
    next_pid: Gva,
    /// The per-CPU address of the number of tasks that run or wait.
    running: u64,
    cpus: PerCpuTable,
}

impl LoadLayout {
    /// Looks up the places. `symbols` must have the slide of the running kernel.
    ///
    /// # Errors
    /// If the kernel's types or symbols do not describe them.
    pub fn new(btf: &Btf, symbols: &Symbols) -> Result<Self, LayoutError> {
        let symbol = |name| {
            symbols.address_of(name).ok_or(LayoutError::Symbol {
                name,
                used_for: "tells its load",
            })
        };
        let next = offset(btf, "pid_namespace.idr.idr_next", 4)?;
        let running = offset(btf, "rq.nr_running", 4)?;
        Ok(Self {
            averages: Gva(symbol("avenrun")?),
            tasks: Gva(symbol("nr_threads")?),
            next_pid: Gva(symbol("init_pid_ns")?.wrapping_add(next)),
            running: symbol("runqueues")?.wrapping_add(running),
            cpus: PerCpuTable::new(symbols)?,
        })
    }

    /// Reads the load.
    ///
    /// # Errors
    /// If one of the numbers cannot be read.
    pub fn read(&self, view: MemoryView<'_>) -> Result<Load, ReadVirtualError> {
        let average = |at: u64| view.u64(Gva(self.averages.0.wrapping_add(at * 8)));
        let mut running = 0;
        for base in self.cpus.bases(view)? {
            running += u64::from(view.u32(Gva(base?.wrapping_add(self.running)))?);
        }
        Ok(Load {
            averages: [average(0)?, average(1)?, average(2)?],
            running,
            tasks: view.u32(self.tasks)?,
            last_pid: view.u32(self.next_pid)?.wrapping_sub(1),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::PausedMemory;
    use crate::kernel::test_kernel::{
        BASE, HALF, Member, Struct, TestKernel, WILD, symbols, types,
    };

    const AVERAGES: u64 = BASE;
    const TASKS: u64 = BASE + 0x100;
    const NAMESPACE: u64 = BASE + 0x200;
    const OFFSETS: u64 = BASE + 0x300;
    const CPUS: u64 = BASE + 0x400;
    const DATA: [u64; 2] = [BASE + 0x1000, BASE + 0x2000];
    const QUEUE: u64 = 0x80;

    const STRUCTS: &[Struct<'static>] = &[
        ("rq", &[("nr_running", 4, HALF)]),
        ("idr", &[("idr_next", 0x14, HALF)]),
        ("pid_namespace", &[("idr", 8, Member::Of("idr"))]),
    ];

    #[test]
    fn the_load_is_that_of_proc() {
        let names = symbols(&[
            ("runqueues", QUEUE),
            ("avenrun", AVERAGES),
            ("nr_threads", TASKS),
            ("init_pid_ns", NAMESPACE),
            ("__per_cpu_offset", OFFSETS),
            ("nr_cpu_ids", CPUS),
        ]);
        let layout = LoadLayout::new(&types(STRUCTS), &names).unwrap();
        let mut kernel = TestKernel::default();
        // 1.50, 0.005 less than 2, and 12.07.
        kernel.words(AVERAGES, &[3072, 4086, 24_720]);
        kernel.words(OFFSETS, &DATA);
        kernel.put_all(&[
            (TASKS, 66, 4),
            (NAMESPACE + 8 + 0x14, 124, 4),
            (CPUS, 2, 4),
            (DATA[0] + QUEUE + 4, 1, 4),
            (DATA[1] + QUEUE + 4, 2, 4),
        ]);
        let paused = PausedMemory::new(&kernel.memory);
        let load = layout.read(kernel.view(&paused)).unwrap();
        assert_eq!(load.to_string(), "1.50 2.00 12.07 3/66 123");
    }

    #[test]
    fn numbers_that_are_not_there_are_an_error() {
        let named = [
            ("runqueues", QUEUE),
            ("avenrun", WILD),
            ("nr_threads", TASKS),
            ("init_pid_ns", NAMESPACE),
            ("__per_cpu_offset", OFFSETS),
            ("nr_cpu_ids", CPUS),
        ];
        let types = types(STRUCTS);
        let kernel = TestKernel::default();
        let paused = PausedMemory::new(&kernel.memory);
        let names = symbols(&named);
        let layout = LoadLayout::new(&types, &names).unwrap();
        let error = layout.read(kernel.view(&paused)).unwrap_err();
        assert!(error.to_string().contains("not mapped"), "{error}");
        for (count, missing) in [(3, "init_pid_ns"), (4, "__per_cpu_offset")] {
            let error = LoadLayout::new(&types, &symbols(&named[..count])).unwrap_err();
            assert!(error.to_string().contains(missing), "{error}");
        }
    }
}
