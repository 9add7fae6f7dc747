//! Conditions of breakpoints, which the client sends as agent expressions (GDB manual, appendix F).
//! They are evaluated at the hit, so one that is false costs no stop.
//!
//! An expression that reads what is not there, has another opcode or takes too long is an error.
//! The hit is then reported, and the client evaluates the condition itself, as it does at each
//! stop.

/// The most steps of one evaluation.
const MOST_STEPS: usize = 10_000;
/// The most values on the stack.
const MOST_VALUES: usize = 100;

/// The opcodes (GDB manual, "Bytecode Descriptions").
mod op {
    pub(super) const ADD: u8 = 0x02;
    pub(super) const SUB: u8 = 0x03;
    pub(super) const MUL: u8 = 0x04;
    pub(super) const DIV_SIGNED: u8 = 0x05;
    pub(super) const DIV_UNSIGNED: u8 = 0x06;
    pub(super) const REM_SIGNED: u8 = 0x07;
    pub(super) const REM_UNSIGNED: u8 = 0x08;
    pub(super) const LSH: u8 = 0x09;
    pub(super) const RSH_SIGNED: u8 = 0x0a;
    pub(super) const RSH_UNSIGNED: u8 = 0x0b;
    pub(super) const LOG_NOT: u8 = 0x0e;
    pub(super) const BIT_AND: u8 = 0x0f;
    pub(super) const BIT_OR: u8 = 0x10;
    pub(super) const BIT_XOR: u8 = 0x11;
    pub(super) const BIT_NOT: u8 = 0x12;
    pub(super) const EQUAL: u8 = 0x13;
    pub(super) const LESS_SIGNED: u8 = 0x14;
    pub(super) const LESS_UNSIGNED: u8 = 0x15;
    pub(super) const EXT: u8 = 0x16;
    pub(super) const REF8: u8 = 0x17;
    pub(super) const REF16: u8 = 0x18;
    pub(super) const REF32: u8 = 0x19;
    pub(super) const REF64: u8 = 0x1a;
    pub(super) const IF_GOTO: u8 = 0x20;
    pub(super) const GOTO: u8 = 0x21;
    pub(super) const CONST8: u8 = 0x22;
    pub(super) const CONST16: u8 = 0x23;
    pub(super) const CONST32: u8 = 0x24;
    pub(super) const CONST64: u8 = 0x25;
    pub(super) const REG: u8 = 0x26;
    pub(super) const END: u8 = 0x27;
    pub(super) const DUP: u8 = 0x28;
    pub(super) const POP: u8 = 0x29;
    pub(super) const ZERO_EXT: u8 = 0x2a;
    pub(super) const SWAP: u8 = 0x2b;
    pub(super) const PICK: u8 = 0x32;
    pub(super) const ROT: u8 = 0x33;
}

/// The registers and the memory of a hit.
pub(crate) trait Scene {
    /// Returns a register by the number of the target description.
    fn register(&self, number: u16) -> Option<u64>;

    /// Reads memory. Returns whether all of it is there.
    fn read(&self, address: u64, buf: &mut [u8]) -> bool;
}

/// The reason why an expression has no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unknown {
    /// It ends, or jumps, outside of itself, or takes values that are not on the stack.
    Malformed,
    /// An opcode that is not evaluated here.
    Opcode(u8),
    /// A register or memory that is not there.
    Missing,
    /// A division by zero.
    Division,
    /// Too many steps or values.
    TooLong,
}

/// Checks whether a breakpoint with these conditions stops: one of them is true or unknown, or
/// there are none.
pub(crate) fn stops(conditions: &[Vec<u8>], scene: &impl Scene) -> bool {
    let is_true = |condition: &Vec<u8>| evaluate(condition, scene) != Ok(0);
    conditions.is_empty() || conditions.iter().any(is_true)
}

/// A breakpoint with conditions, of a packet that sets it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Conditional<'p> {
    pub(crate) address: u64,
    /// The packet's body without the conditions.
    pub(crate) plain: &'p str,
    pub(crate) conditions: Vec<Vec<u8>>,
}

/// Reads the body of a packet `Z0` or `Z1`: `Z0,ADDRESS,KIND[;XLENGTH,CODE...]` with hexadecimal
/// numbers (GDB manual, "Packets"). Returns `None` if it is another or malformed.
pub(crate) fn of_packet(body: &[u8]) -> Option<Conditional<'_>> {
    let body = std::str::from_utf8(body).ok()?;
    let (plain, mut rest) = body.split_once(';').unwrap_or((body, ""));
    let address = plain.split(',').nth(1)?;
    let address = u64::from_str_radix(address, 16).ok()?;
    let mut conditions = Vec::new();
    while !rest.is_empty() {
        let (length, behind) = rest.strip_prefix('X')?.split_once(',')?;
        let length = usize::from_str_radix(length, 16).ok()?;
        let (code, behind) = behind.split_at_checked(length.checked_mul(2)?)?;
        let bytes = code.as_bytes().as_chunks::<2>().0.iter();
        let byte = |digits: &[u8; 2]| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 16).ok()
        };
        conditions.push(bytes.map(byte).collect::<Option<Vec<u8>>>()?);
        rest = behind.strip_prefix(';').unwrap_or(behind);
    }
    Some(Conditional {
        address,
        plain,
        conditions,
    })
}

/// Returns the value of an expression.
fn evaluate(code: &[u8], scene: &impl Scene) -> Result<u64, Unknown> {
    let mut machine = StackMachine {
        code,
        at: 0,
        values: Vec::new(),
    };
    for _ in 0..MOST_STEPS {
        if let Some(value) = machine.step(scene)? {
            return Ok(value);
        }
    }
    Err(Unknown::TooLong)
}

struct StackMachine<'c> {
    code: &'c [u8],
    at: usize,
    values: Vec<u64>,
}

impl StackMachine<'_> {
    fn pop(&mut self) -> Result<u64, Unknown> {
        self.values.pop().ok_or(Unknown::Malformed)
    }

    fn push(&mut self, value: u64) -> Result<(), Unknown> {
        if self.values.len() >= MOST_VALUES {
            return Err(Unknown::TooLong);
        }
        self.values.push(value);
        Ok(())
    }

    /// Takes the next bytes of the code, most significant first.
    fn operand(&mut self, length: usize) -> Result<u64, Unknown> {
        let end = self.at.checked_add(length).ok_or(Unknown::Malformed)?;
        let bytes = self.code.get(self.at..end).ok_or(Unknown::Malformed)?;
        self.at = end;
        Ok(bytes
            .iter()
            .fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn unary(&mut self, operate: impl FnOnce(u64) -> u64) -> Result<(), Unknown> {
        let value = self.pop()?;
        self.push(operate(value))
    }

    fn binary(&mut self, operate: impl FnOnce(u64, u64) -> Option<u64>) -> Result<(), Unknown> {
        let (second, first) = (self.pop()?, self.pop()?);
        self.push(operate(first, second).ok_or(Unknown::Division)?)
    }

    fn fetch(&mut self, scene: &impl Scene, length: usize) -> Result<(), Unknown> {
        let address = self.pop()?;
        let mut bytes = [0; 8];
        let part = bytes.get_mut(..length).ok_or(Unknown::Malformed)?;
        match scene.read(address, part) {
            true => self.push(u64::from_le_bytes(bytes)),
            false => Err(Unknown::Missing),
        }
    }

    /// Executes an opcode. Returns the value at the end.
    fn step(&mut self, scene: &impl Scene) -> Result<Option<u64>, Unknown> {
        let opcode = self.operand(1)? as u8;
        let truth = |is_true| Some(u64::from(is_true));
        match opcode {
            op::ADD => self.binary(|a, b| Some(a.wrapping_add(b)))?,
            op::SUB => self.binary(|a, b| Some(a.wrapping_sub(b)))?,
            op::MUL => self.binary(|a, b| Some(a.wrapping_mul(b)))?,
            op::DIV_SIGNED => self.binary(|a, b| signed(a, b, i64::checked_div))?,
            op::DIV_UNSIGNED => self.binary(u64::checked_div)?,
            op::REM_SIGNED => self.binary(|a, b| signed(a, b, i64::checked_rem))?,
            op::REM_UNSIGNED => self.binary(u64::checked_rem)?,
            op::LSH => self.binary(|a, b| Some(shifted(b).map_or(0, |by| a << by)))?,
            op::RSH_SIGNED => self.binary(|a, b| {
                let by = shifted(b).unwrap_or(u64::BITS - 1);
                Some((a.cast_signed() >> by).cast_unsigned())
            })?,
            op::RSH_UNSIGNED => self.binary(|a, b| Some(shifted(b).map_or(0, |by| a >> by)))?,
            op::LOG_NOT => self.unary(|a| u64::from(a == 0))?,
            op::BIT_AND => self.binary(|a, b| Some(a & b))?,
            op::BIT_OR => self.binary(|a, b| Some(a | b))?,
            op::BIT_XOR => self.binary(|a, b| Some(a ^ b))?,
            op::BIT_NOT => self.unary(|a| !a)?,
            op::EQUAL => self.binary(|a, b| truth(a == b))?,
            op::LESS_SIGNED => self.binary(|a, b| truth(a.cast_signed() < b.cast_signed()))?,
            op::LESS_UNSIGNED => self.binary(|a, b| truth(a < b))?,
            op::EXT => {
                let spare = self.spare_bits()?;
                self.unary(|a| ((a << spare).cast_signed() >> spare).cast_unsigned())?;
            }
            op::REF8 => self.fetch(scene, 1)?,
            op::REF16 => self.fetch(scene, 2)?,
            op::REF32 => self.fetch(scene, 4)?,
            op::REF64 => self.fetch(scene, 8)?,
            op::IF_GOTO => {
                let target = self.operand(2)?;
                if self.pop()? != 0 {
                    self.at = target as usize;
                }
            }
            op::GOTO => self.at = self.operand(2)? as usize,
            op::CONST8 => self.constant(1)?,
            op::CONST16 => self.constant(2)?,
            op::CONST32 => self.constant(4)?,
            op::CONST64 => self.constant(8)?,
            op::REG => {
                let number = self.operand(2)? as u16;
                self.push(scene.register(number).ok_or(Unknown::Missing)?)?;
            }
            op::END => return self.pop().map(Some),
            op::DUP => self.pick(0)?,
            op::POP => {
                self.pop()?;
            }
            op::ZERO_EXT => {
                let spare = self.spare_bits()?;
                self.unary(|a| a << spare >> spare)?;
            }
            op::SWAP => {
                let (second, first) = (self.pop()?, self.pop()?);
                self.push(second)?;
                self.push(first)?;
            }
            op::PICK => {
                let depth = self.operand(1)?;
                self.pick(depth as usize)?;
            }
            op::ROT => {
                let (third, second, first) = (self.pop()?, self.pop()?, self.pop()?);
                self.push(third)?;
                self.push(first)?;
                self.push(second)?;
            }
            other => return Err(Unknown::Opcode(other)),
        }
        Ok(None)
    }

    fn constant(&mut self, length: usize) -> Result<(), Unknown> {
        let value = self.operand(length)?;
        self.push(value)
    }

    /// Copies the value that stands so deep under the top.
    fn pick(&mut self, depth: usize) -> Result<(), Unknown> {
        let value = self.values.iter().rev().nth(depth).copied();
        self.push(value.ok_or(Unknown::Malformed)?)
    }

    /// Takes a number of bits, and returns those that a value has besides.
    fn spare_bits(&mut self) -> Result<u32, Unknown> {
        match self.operand(1)? as u32 {
            bits @ 1..=u64::BITS => Ok(u64::BITS - bits),
            _ => Err(Unknown::Malformed),
        }
    }
}

fn signed(a: u64, b: u64, operate: fn(i64, i64) -> Option<i64>) -> Option<u64> {
    operate(a.cast_signed(), b.cast_signed()).map(i64::cast_unsigned)
}

/// Returns the number of places of a shift that leaves something.
fn shifted(by: u64) -> Option<u32> {
    u32::try_from(by).ok().filter(|by| *by < u64::BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Registers whose values are their numbers, and memory at 0x1000.
    struct Still([u8; 8]);

    impl Scene for Still {
        fn register(&self, number: u16) -> Option<u64> {
            (number < 17).then_some(u64::from(number))
        }

        fn read(&self, address: u64, buf: &mut [u8]) -> bool {
            let from = address
                .checked_sub(0x1000)
                .and_then(|at| self.0.get(at as usize..));
            let there = from.and_then(|bytes| bytes.get(..buf.len()));
            there.is_some_and(|bytes| {
                buf.copy_from_slice(bytes);
                true
            })
        }
    }

    fn value(code: &[u8]) -> Result<u64, Unknown> {
        evaluate(code, &Still([0xf0, 0xff, 3, 4, 5, 6, 7, 8]))
    }

    #[test]
    fn expressions_have_their_values() {
        const MINUS_ONE: u64 = u64::MAX;
        for (code, expected) in [
            // rdi == 5, as gdb sends it: reg 5, const8 5, equal, end.
            (&[0x26, 0, 5, 0x22, 5, 0x13, 0x27][..], 1),
            // *(short *)0x1000 == -16: const16, ref16, ext 16, const8 16, const8 0, swap, sub,
            // equal.
            (
                &[
                    0x23, 0x10, 0, 0x18, 0x16, 16, 0x22, 16, 0x22, 0, 0x2b, 0x03, 0x13, 0x27,
                ],
                1,
            ),
            (&[0x23, 0x10, 2, 0x19, 0x27], 0x0605_0403),
            (&[0x23, 0x10, 0, 0x1a, 0x2a, 8, 0x27], 0xf0),
            (&[0x22, 9, 0x22, 4, 0x03, 0x27], 5),
            (&[0x22, 9, 0x22, 4, 0x07, 0x27], 1),
            (&[0x22, 9, 0x12, 0x22, 2, 0x05, 0x27], 5_u64.wrapping_neg()),
            (&[0x22, 1, 0x22, 64, 0x09, 0x27], 0),
            (&[0x22, 0, 0x12, 0x22, 70, 0x0a, 0x27], MINUS_ONE),
            (&[0x22, 0, 0x12, 0x22, 1, 0x14, 0x27], 1),
            (&[0x22, 0, 0x12, 0x22, 1, 0x15, 0x27], 0),
            (&[0x24, 1, 2, 3, 4, 0x27], 0x0102_0304),
            (&[0x25, 0, 0, 0, 0, 1, 2, 3, 4, 0x27], 0x0102_0304),
            // 1 && 2, by a jump to the end.
            (&[0x22, 1, 0x20, 0, 8, 0x22, 0, 0x27, 0x22, 2, 0x27], 2),
            (&[0x22, 1, 0x22, 2, 0x22, 3, 0x33, 0x27], 2),
            (&[0x22, 1, 0x22, 2, 0x22, 3, 0x33, 0x29, 0x27], 1),
            (&[0x22, 7, 0x22, 8, 0x32, 1, 0x27], 7),
            (&[0x22, 7, 0x28, 0x04, 0x0e, 0x0e, 0x27], 1),
        ] {
            assert_eq!(value(code), Ok(expected), "{code:02x?}");
        }
    }

    #[test]
    fn an_expression_without_a_value_is_an_error() {
        for (code, expected) in [
            (&[][..], Unknown::Malformed),
            (&[0x27], Unknown::Malformed),
            (&[0x24, 1, 2], Unknown::Malformed),
            (&[0x22, 1, 0x16, 65, 0x27], Unknown::Malformed),
            (&[0x22, 1, 0x16, 0, 0x27], Unknown::Malformed),
            (&[0x21, 0xff, 0xff], Unknown::Malformed),
            (&[0x22, 1, 0x32, 1, 0x27], Unknown::Malformed),
            (&[0x01, 0x27], Unknown::Opcode(1)),
            (&[0x26, 0, 99, 0x27], Unknown::Missing),
            (&[0x22, 8, 0x1a, 0x27], Unknown::Missing),
            (&[0x22, 8, 0x22, 0, 0x05, 0x27], Unknown::Division),
            (&[0x21, 0, 0], Unknown::TooLong),
            (&[0x22, 1, 0x21, 0, 0], Unknown::TooLong),
        ] {
            assert_eq!(value(code), Err(expected), "{code:02x?}");
        }
    }

    #[test]
    fn a_breakpoint_stops_unless_all_its_conditions_are_false() {
        let scene = Still([0; 8]);
        let (no, yes, unknown) = (vec![0x22, 0, 0x27], vec![0x22, 2, 0x27], vec![0x01]);
        for (conditions, expected) in [
            (vec![], true),
            (vec![no.clone()], false),
            (vec![no.clone(), yes.clone()], true),
            (vec![no.clone(), unknown], true),
            (vec![yes, no], true),
        ] {
            assert_eq!(stops(&conditions, &scene), expected, "{conditions:02x?}");
        }
    }
}
