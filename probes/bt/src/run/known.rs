//! The values of builtin variables.

use std::sync::atomic::Ordering;

use probes::fields::RECORD;

use super::{Machine, count, numbers};
use crate::context::Context;
use crate::program::Known;
use crate::value::Value;

/// Errors are the last numbers of a word (include/linux/err.h).
const MAX_ERRNO: u64 = 4095;

impl<C: Context + ?Sized> Machine<'_, C> {
    /// Returns the value of a builtin variable.
    pub(super) fn known(&mut self, known: Known) -> Value {
        let context = self.context;
        match known {
            Known::Argument(number) => numbers::unsigned(context.argument(number)),
            Known::Comm => Value::Text(self.scratch.name(&context.comm())),
            Known::Cpu => Value::Int(context.cpu() as i64),
            Known::Nsecs => numbers::unsigned(self.now()),
            Known::Elapsed => {
                let since = self.now().saturating_sub(self.shared.began);
                numbers::unsigned(since)
            }
            Known::Pid => Value::Int(context.process().into()),
            Known::Tid => Value::Int(context.thread().into()),
            Known::Probe => Value::Text(self.probe.name.clone()),
            Known::ProbeType => {
                // BEGIN and END stand for themselves.
                let name = &self.probe.name;
                let end = name.iter().position(|byte| *byte == b':');
                Value::text(end.map_or(b"special", |end| name.get(..end).unwrap_or_default()))
            }
            Known::Function => Value::Text(self.probe.function.clone()),
            Known::Returned => numbers::unsigned(context.returned().unwrap_or_default()),
            Known::ReturnedOrMinusOne => {
                let returned = context.returned().unwrap_or_default();
                Value::Int(match returned.wrapping_neg() {
                    1..=MAX_ERRNO => -1,
                    _ => returned.cast_signed(),
                })
            }
            Known::Record => {
                if !context.has_record() {
                    count(&self.shared.faults.records);
                }
                numbers::unsigned(RECORD)
            }
            Known::Task => numbers::unsigned(context.task()),
            Known::Random => Value::Int(self.random().into()),
            Known::CpuCount => Value::Int(self.shared.cpus as i64),
            Known::ProgramCounter => numbers::unsigned(context.pc()),
            Known::Register(register) => numbers::unsigned(context.register(register)),
        }
    }

    /// Returns 32 bits of a pseudo-random sequence (splitmix64 by Steele, Lea and Flood).
    fn random(&self) -> u32 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let state = self.shared.random.fetch_add(STEP, Ordering::Relaxed);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed >> 32) as u32
    }
}
