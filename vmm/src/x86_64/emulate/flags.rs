//! The status flags of additions, subtractions and bitwise results, and the RFLAGS bits for the
//! emulator.
//!
//! Values are unsigned 64-bit numbers with all bits above the operand size clear. Sizes are in
//! bytes: 1, 2, 4 or 8.

use iced_x86::ConditionCode;

pub(super) use crate::x86_64::rflags::*;

/// Returns all bits of an operand of `size` bytes.
pub(super) fn mask(size: usize) -> u64 {
    match size {
        1 => 0xff,
        2 => 0xffff,
        4 => 0xffff_ffff,
        _ => u64::MAX,
    }
}

/// Returns the sign bit of an operand of `size` bytes.
pub(super) fn sign_bit(size: usize) -> u64 {
    mask(size) ^ (mask(size) >> 1)
}

/// Returns `value` of `size` bytes as a signed number.
pub(super) fn sign_extend(size: usize, value: u64) -> i64 {
    match size {
        1 => i64::from(value as u8 as i8),
        2 => i64::from(value as u16 as i16),
        4 => i64::from(value as u32 as i32),
        _ => value as i64,
    }
}

/// Returns `flag` if `condition` holds, else 0.
pub(super) fn when(flag: u64, condition: bool) -> u64 {
    if condition { flag } else { 0 }
}

/// Returns SF, ZF and PF of a result. PF depends on the low byte only.
pub(super) fn of_result(size: usize, result: u64) -> u64 {
    when(SF, result & sign_bit(size) != 0)
        | when(ZF, result == 0)
        | when(PF, (result as u8).count_ones().is_multiple_of(2))
}

/// Returns `a + b + carry` and all six status flags.
pub(super) fn add(size: usize, a: u64, b: u64, carry: bool) -> (u64, u64) {
    let wide = u128::from(a) + u128::from(b) + u128::from(carry);
    let result = wide as u64 & mask(size);
    let flags = of_result(size, result)
        | when(CF, wide > u128::from(mask(size)))
        | when(AF, (a ^ b ^ result) & 0x10 != 0)
        | when(OF, (a ^ result) & (b ^ result) & sign_bit(size) != 0);
    (result, flags)
}

/// Returns `a - b - borrow` and all six status flags.
pub(super) fn subtract(size: usize, a: u64, b: u64, borrow: bool) -> (u64, u64) {
    let result = a.wrapping_sub(b).wrapping_sub(u64::from(borrow)) & mask(size);
    let flags = of_result(size, result)
        | when(CF, u128::from(a) < u128::from(b) + u128::from(borrow))
        | when(AF, (a ^ b ^ result) & 0x10 != 0)
        | when(OF, (a ^ b) & (a ^ result) & sign_bit(size) != 0);
    (result, flags)
}

/// Checks whether a condition of Jcc, SETcc or CMOVcc holds.
pub(super) fn condition(code: ConditionCode, rflags: u64) -> bool {
    let set = |flag| rflags & flag != 0;
    match code {
        ConditionCode::None => true,
        ConditionCode::o => set(OF),
        ConditionCode::no => !set(OF),
        ConditionCode::b => set(CF),
        ConditionCode::ae => !set(CF),
        ConditionCode::e => set(ZF),
        ConditionCode::ne => !set(ZF),
        ConditionCode::be => set(CF | ZF),
        ConditionCode::a => !set(CF | ZF),
        ConditionCode::s => set(SF),
        ConditionCode::ns => !set(SF),
        ConditionCode::p => set(PF),
        ConditionCode::np => !set(PF),
        ConditionCode::l => set(SF) != set(OF),
        ConditionCode::ge => set(SF) == set(OF),
        ConditionCode::le => set(ZF) || set(SF) != set(OF),
        ConditionCode::g => !set(ZF) && set(SF) == set(OF),
    }
}
