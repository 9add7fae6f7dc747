//! The types that C and its headers name: numbers, well-known typedefs, and enums.

use std::sync::Arc;

use introspect::kernel::btf::{Btf, TypeId};

use super::types::MemoryType;
use crate::ast::Enum;
use crate::shape::EnumNames;

/// Returns C's number of x86-64 with this name, its words in any order, or one that bpftrace and
/// stdint.h name.
pub(super) fn c_number(name: &str) -> Option<MemoryType> {
    let number = |bytes, signed| Some(MemoryType::Number { bytes, signed });
    let mut words: Vec<&str> = name.split(' ').collect();
    words.sort_unstable();
    let unsigned = words.contains(&"unsigned");
    words.retain(|word| !matches!(*word, "unsigned" | "signed"));
    let named = words.len() < name.split(' ').count();
    match words.as_slice() {
        ["void"] => Some(MemoryType::Unknown),
        ["char"] if !named => Some(MemoryType::Char),
        ["char"] => number(1, !unsigned),
        ["_Bool" | "bool"] if !named => Some(MemoryType::Bool),
        ["short"] | ["int", "short"] => number(2, !unsigned),
        ["int"] => number(4, !unsigned),
        [] if named => number(4, !unsigned),
        ["long"] | ["int" | "long", "long"] | ["int", "long", "long"] => number(8, !unsigned),
        _ if named => None,
        ["int8" | "int8_t"] => number(1, true),
        ["int16" | "int16_t"] => number(2, true),
        ["int32" | "int32_t"] => number(4, true),
        ["int64" | "int64_t"] => number(8, true),
        ["uint8" | "uint8_t"] => number(1, false),
        ["uint16" | "uint16_t"] => number(2, false),
        ["uint32" | "uint32_t"] => number(4, false),
        ["uint64" | "uint64_t" | "uintptr_t"] => number(8, false),
        _ => None,
    }
}

/// Returns a well-known typedef, for guests whose kernel has no types, and for the arguments of
/// system calls there.
pub(super) fn own_typedef(name: &str) -> Option<MemoryType> {
    let (bytes, signed) = match name {
        "size_t" | "u64" | "__u64" | "dev_t" | "umode_t_long" | "aio_context_t" => (8, false),
        "ssize_t" | "off_t" | "loff_t" | "s64" | "__s64" | "time_t" => (8, true),
        "u32" | "__u32" | "uid_t" | "gid_t" | "qid_t" | "rwf_t" => (4, false),
        "pid_t" | "s32" | "__s32" | "key_t" | "clockid_t" | "timer_t" | "mqd_t"
        | "key_serial_t" => (4, true),
        "u16" | "__u16" | "umode_t" => (2, false),
        "s16" | "__s16" => (2, true),
        "u8" | "__u8" => (1, false),
        "s8" | "__s8" => (1, true),
        _ => return None,
    };
    Some(MemoryType::Number { bytes, signed })
}

/// Returns the names of one of the kernel's enums.
pub(super) fn kernel_enum(btf: &Btf, id: TypeId) -> Arc<EnumNames> {
    let members = btf.enumerators(id).into_iter().rev();
    Arc::new(
        members
            .map(|(name, number)| (number, name.into()))
            .collect(),
    )
}

/// Returns the type of an enum of the script's: as large as its numbers need, as in C.
pub(super) fn own_enum(of: &Enum) -> MemoryType {
    let fits = |low: i64, high: i64| (of.members).iter().all(|(_, n)| (low..=high).contains(n));
    let unsigned = fits(0, u32::MAX.into());
    let narrow = unsigned || fits(i32::MIN.into(), i32::MAX.into());
    let members = of.members.iter().rev();
    MemoryType::Enum {
        bytes: if narrow { 4 } else { 8 },
        signed: !unsigned,
        names: Arc::new(
            members
                .map(|(name, n)| (*n, name.as_str().into()))
                .collect(),
        ),
    }
}
