//! Arguments of a static probe: the strings of `.note.stapsdt`, of which each says where the value stands, as the assembler wrote it.
//!
//! The caller brings the string and a way to look up symbols of the same file; at the hit, the registers, the distance between the file's
//! addresses and the process's, and a way to read the process's memory. Solved: the AT&T syntax for x86-64,
//!
//! ```text
//! args    = [ arg { " " arg } ] ;
//! arg     = [ size "@" ] operand ;
//! size    = [ "-" ] ( "1" | "2" | "4" | "8" ) [ "f" ] ;
//! operand = "$" sum | "%" register | sum | [ sum ] "(" [ "%" base ] [ "," "%" index [ "," scale ] ] ")" ;
//! sum     = [ "-" ] term { ( "+" | "-" ) term } ;            (* at most one symbol *)
//! term    = integer | symbol ;
//! ```
//!
//! Not solved: registers other than the general ones (`%xmm0`, `%st`) and segments (`%fs:…`), whose values are not at hand; symbols by way
//! of the global offset table (`x@GOTPCREL(%rip)`). An argument that is not understood is kept with the reason, for the others are.

use std::fmt;

use super::register::Register;
use crate::x86_64::GeneralRegisters;

/// Most arguments of a probe that are taken: what SystemTap's macros can write (sys/sdt.h).
pub const MAX_ARGUMENTS: usize = 12;
/// Longest text of one argument that is taken, in bytes; mangled names of symbols may be long.
const MAX_TEXT: usize = 1024;

/// Why an argument's text is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArgumentError {
    /// Bytes that values of registers do not have.
    #[error("a value of size {0:?}; 1, 2, 4 and 8 bytes are read")]
    Size(String),
    /// A register that is not at hand at a hit.
    #[error("register %{0}, which is no general register")]
    Register(String),
    /// A symbol that the file's tables do not have, or have several times.
    #[error("symbol {0:?}, which the file's symbol tables do not name, or not once")]
    Symbol(String),
    /// Something else.
    #[error("{0:?} is no operand of the x86 AT&T syntax that is read")]
    Syntax(String),
    /// Longer than any.
    #[error("a text of {found} bytes, at most {MAX_TEXT} are read")]
    Long {
        /// Its length in bytes.
        found: usize,
    },
}

/// How many bytes a value has, and what they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValueKind {
    /// 1, 2, 4 or 8.
    pub size: u8,
    /// It is a number that may be negative: sign-extended to 64 bits.
    pub signed: bool,
    /// It is a floating-point number, given as its bits.
    pub floating: bool,
}

impl ValueKind {
    /// The type of C that such a value has: `int32_t`, `uint8_t`, `double`.
    #[must_use]
    pub fn type_name(self) -> &'static str {
        match (self.floating, self.signed, self.size) {
            (true, _, 4) => "float",
            (true, _, 8) => "double",
            (_, true, 1) => "int8_t",
            (_, true, 2) => "int16_t",
            (_, true, 4) => "int32_t",
            (_, true, _) => "int64_t",
            (_, false, 1) => "uint8_t",
            (_, false, 2) => "uint16_t",
            (_, false, 4) => "uint32_t",
            (_, false, _) => "uint64_t",
        }
    }

    /// The low bytes of `bits`, sign-extended to 64 bits if it is signed, else zero-extended.
    fn of(self, bits: u64) -> u64 {
        let above = 64 - 8 * u32::from(self.size.clamp(1, 8));
        match self.signed && !self.floating {
            true => ((bits << above) as i64 >> above) as u64,
            false => bits << above >> above,
        }
    }
}

/// A number, or the address of a symbol and a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Sum {
    /// Modulo 2^64.
    number: u64,
    /// It is a link-time address: in a process the load bias is added.
    is_address: bool,
}

impl Sum {
    fn value(self, bias: u64) -> u64 {
        match self.is_address {
            true => self.number.wrapping_add(bias),
            false => self.number,
        }
    }
}

/// Where a value stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operand {
    Constant(Sum),
    Register(Register),
    Memory {
        displacement: Sum,
        base: Option<Register>,
        index: Option<(Register, u8)>,
    },
}

/// One argument of a probe at one of its sites.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SiteArgument {
    text: String,
    kind: Option<ValueKind>,
    operand: Result<Operand, ArgumentError>,
}

impl SiteArgument {
    /// Reads the text of one argument. `address_of` gives the link-time address of a symbol of the same file.
    #[must_use]
    pub fn parse(text: &str, address_of: &dyn Fn(&str) -> Option<u64>) -> Self {
        if text.len() > MAX_TEXT {
            let found = text.len();
            return Self {
                text: text.chars().take(MAX_TEXT / 4).collect(),
                kind: None,
                operand: Err(ArgumentError::Long { found }),
            };
        }
        // A symbol may have an @, too, but none has a size in front of it.
        let sized = text
            .split_once('@')
            .filter(|(size, _)| size.starts_with(|c: char| c == '-' || c.is_ascii_digit()));
        let (size, operand) = match sized {
            Some((size, operand)) => (Some(size), operand),
            None => (None, text),
        };
        let operand = read_operand(operand, address_of);
        let kind = size.map(read_size);
        let (kind, operand) = match (kind, operand) {
            (Some(Err(error)), _) => (None, Err(error)),
            (Some(Ok(kind)), operand) => (Some(kind), operand),
            // Notes of the first version give no sizes: what the operand itself says.
            (None, operand) => {
                let size = match &operand {
                    Ok(Operand::Register(register)) => register.size(),
                    _ => 8,
                };
                let kind = ValueKind {
                    size,
                    signed: false,
                    floating: false,
                };
                (operand.is_ok().then_some(kind), operand)
            }
        };
        Self {
            text: text.to_owned(),
            kind,
            operand,
        }
    }

    /// Reads the arguments of a site, at most [`MAX_ARGUMENTS`].
    #[must_use]
    pub fn parse_all(text: &str, address_of: &dyn Fn(&str) -> Option<u64>) -> Vec<Self> {
        texts(text)
            .map(|text| Self::parse(text, address_of))
            .collect()
    }

    /// As the note has it.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What its value is; `None` if its size is not understood.
    #[must_use]
    pub fn kind(&self) -> Option<ValueKind> {
        self.kind
    }

    /// Why its value is never known, if so.
    #[must_use]
    pub fn error(&self) -> Option<&ArgumentError> {
        self.operand.as_ref().err()
    }

    /// Its value at a hit of its site, extended to 64 bits; `None` if the text is not understood or its memory cannot be read. `bias` is
    /// what is added to link-time addresses, and `read` fills a buffer from the process's memory.
    #[must_use]
    pub fn value(
        &self,
        registers: &GeneralRegisters,
        bias: u64,
        read: &dyn Fn(u64, &mut [u8]) -> bool,
    ) -> Option<u64> {
        let kind = self.kind?;
        let bits = match self.operand.as_ref().ok()? {
            Operand::Constant(sum) => sum.value(bias),
            Operand::Register(register) => register.bits_from_lowest(registers),
            Operand::Memory {
                displacement,
                base,
                index,
            } => {
                let mut address = displacement.value(bias);
                // `symbol(%rip)` is the symbol's own address.
                let base =
                    base.filter(|base| !(displacement.is_address && base.is_instruction_pointer()));
                if let Some(base) = base {
                    address = address.wrapping_add(base.value(registers));
                }
                if let Some((index, scale)) = index {
                    let scaled = index.value(registers).wrapping_mul(u64::from(*scale));
                    address = address.wrapping_add(scaled);
                }
                let parts = base.iter().chain(index.iter().map(|(index, _)| index));
                // Addresses that are counted in 32 bits (Intel SDM volume 1, section 3.3.7.1).
                if parts.clone().any(|register| register.size() == 4) {
                    address &= 0xffff_ffff;
                }
                let mut bytes = [0; 8];
                let wanted = bytes.get_mut(..usize::from(kind.size))?;
                if !read(address, wanted) {
                    return None;
                }
                u64::from_le_bytes(bytes)
            }
        };
        Some(kind.of(bits))
    }
}

impl fmt::Display for SiteArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The texts of a site's arguments, at most [`MAX_ARGUMENTS`].
fn texts(arguments: &str) -> impl Iterator<Item = &str> {
    arguments.split_ascii_whitespace().take(MAX_ARGUMENTS)
}

/// The symbols that a site's arguments may name, those that are none among them.
pub(super) fn symbols_in(arguments: &str) -> impl Iterator<Item = &str> {
    texts(arguments)
        .filter(|text| text.len() <= MAX_TEXT)
        .flat_map(|text| text.split(|c: char| "@$%(),+-".contains(c)))
        .filter(|word| is_symbol(word))
}

fn is_symbol(word: &str) -> bool {
    let may_be_in = |c: char| c.is_ascii_alphanumeric() || "_.$".contains(c) || !c.is_ascii();
    !word.is_empty()
        && !word.starts_with(|c: char| c.is_ascii_digit())
        && word.chars().all(may_be_in)
}

fn read_size(text: &str) -> Result<ValueKind, ArgumentError> {
    let (signed, rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (floating, size) = match rest.strip_suffix('f') {
        Some(size) => (true, size),
        None => (false, rest),
    };
    let size = match size {
        "1" => 1,
        "2" => 2,
        "4" => 4,
        "8" => 8,
        _ => return Err(ArgumentError::Size(text.to_owned())),
    };
    Ok(ValueKind {
        size,
        signed,
        floating,
    })
}

fn read_operand(
    text: &str,
    address_of: &dyn Fn(&str) -> Option<u64>,
) -> Result<Operand, ArgumentError> {
    let syntax = || ArgumentError::Syntax(text.to_owned());
    if let Some(constant) = text.strip_prefix('$') {
        return read_sum(constant, address_of).map(Operand::Constant);
    }
    if text.starts_with('%') {
        return read_register(text).map(Operand::Register);
    }
    let Some((displacement, rest)) = text.split_once('(') else {
        // Memory at a fixed address.
        return Ok(Operand::Memory {
            displacement: read_sum(text, address_of)?,
            base: None,
            index: None,
        });
    };
    let registers = rest.strip_suffix(')').ok_or_else(syntax)?;
    let displacement = match displacement {
        "" => Sum::default(),
        sum => read_sum(sum, address_of)?,
    };
    let parts: Vec<&str> = registers.split(',').collect();
    let (base, index, scale) = match *parts.as_slice() {
        [base] => (base, "", ""),
        [base, index] => (base, index, ""),
        [base, index, scale] => (base, index, scale),
        _ => return Err(syntax()),
    };
    let base = match base {
        "" => None,
        name => Some(read_register(name)?),
    };
    let scale = match scale {
        "" | "1" => 1,
        "2" => 2,
        "4" => 4,
        "8" => 8,
        _ => return Err(syntax()),
    };
    let index = match index {
        "" => None,
        name => Some((read_register(name)?, scale)),
    };
    // Nothing in between, or parts that no address is made of.
    let mut registers = base.iter().chain(index.iter().map(|(index, _)| index));
    if base.is_none() && index.is_none() || registers.any(|register| register.size() < 4) {
        return Err(syntax());
    }
    Ok(Operand::Memory {
        displacement,
        base,
        index,
    })
}

fn read_register(text: &str) -> Result<Register, ArgumentError> {
    let name = text
        .strip_prefix('%')
        .ok_or_else(|| ArgumentError::Syntax(text.to_owned()))?;
    Register::of(name).ok_or_else(|| ArgumentError::Register(name.to_owned()))
}

fn read_sum(text: &str, address_of: &dyn Fn(&str) -> Option<u64>) -> Result<Sum, ArgumentError> {
    let syntax = || ArgumentError::Syntax(text.to_owned());
    let mut sum = Sum::default();
    let (mut rest, mut negative) = match text.strip_prefix('-') {
        Some(rest) => (rest, true),
        None => (text.strip_prefix('+').unwrap_or(text), false),
    };
    loop {
        let end = rest.find(['+', '-']).unwrap_or(rest.len());
        let (term, behind) = rest.split_at_checked(end).ok_or_else(syntax)?;
        let number = match read_integer(term) {
            Some(number) => number,
            None if is_symbol(term) && !negative && !sum.is_address => {
                sum.is_address = true;
                address_of(term).ok_or_else(|| ArgumentError::Symbol(term.to_owned()))?
            }
            None => return Err(syntax()),
        };
        sum.number = match negative {
            true => sum.number.wrapping_sub(number),
            false => sum.number.wrapping_add(number),
        };
        let mut signs = behind.chars();
        match signs.next() {
            None => return Ok(sum),
            Some(sign) => {
                negative = sign == '-';
                rest = signs.as_str();
                // As assemblers write `symbol+-8`.
                if let Some(number) = rest.strip_prefix('-') {
                    negative = !negative;
                    rest = number;
                }
            }
        }
    }
}

/// Decimal, hexadecimal with 0x, octal with 0, up to 64 bits.
fn read_integer(text: &str) -> Option<u64> {
    let digits = |text: &str, radix| match text.starts_with('+') {
        true => None,
        false => u64::from_str_radix(text, radix).ok(),
    };
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hexadecimal) => digits(hexadecimal, 16),
        None => match text.strip_prefix('0').filter(|rest| !rest.is_empty()) {
            Some(octal) => digits(octal, 8),
            None => digits(text, 10),
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::super::register::distinct_registers;
    use super::*;

    const BIAS: u64 = 0x5555_0000_0000;

    fn symbol(name: &str) -> Option<u64> {
        match name {
            "counter" => Some(0x4010),
            "_ZN3one3twoE.lto_priv.0" => Some(0x4020),
            _ => None,
        }
    }

    /// Memory in which every byte is the lowest of its address, and the address asked for.
    fn value(text: &str) -> (Option<u64>, Option<u64>) {
        let asked = std::cell::Cell::new(None);
        let read = |address: u64, buf: &mut [u8]| {
            asked.set(Some(address));
            for (at, byte) in (address..).zip(buf.iter_mut()) {
                *byte = at as u8;
            }
            true
        };
        let argument = SiteArgument::parse(text, &symbol);
        (
            argument.value(&distinct_registers(), BIAS, &read),
            asked.get(),
        )
    }

    #[test]
    fn values_are_cut_and_extended_by_their_size() {
        for (text, expected) in [
            ("8@%rdi", 0x8182_8384_8586_8705),
            ("-8@%rdi", 0x8182_8384_8586_8705),
            ("4@%edi", 0x8586_8705),
            ("-4@%edi", 0xffff_ffff_8586_8705),
            // The size counts, whatever the register is called.
            ("-4@%rdi", 0xffff_ffff_8586_8705),
            ("4@%di", 0x8586_8705),
            ("2@%di", 0x8705),
            ("-2@%di", 0xffff_ffff_ffff_8705),
            ("1@%dil", 5),
            ("1@%ah", 0x87),
            ("-1@%ah", 0xffff_ffff_ffff_ff87),
            ("4@%ah", 0x87),
            ("-1@%r12b", 12),
            ("4@%r12d", 0x8586_870c),
            ("4f@%eax", 0x8586_8700),
            ("-8f@%rax", 0x8182_8384_8586_8700),
            ("-4@$-1", u64::MAX),
            ("4@$-1", 0xffff_ffff),
            ("-4@$5", 5),
            ("-1@$255", u64::MAX),
            ("2@$0x12345", 0x2345),
            ("8@$-9223372036854775808", 1 << 63),
            ("8@$18446744073709551615", u64::MAX),
            ("8@$010", 8),
            ("8@$counter", BIAS + 0x4010),
            ("8@$counter+16", BIAS + 0x4020),
            // Of notes without sizes.
            ("%eax", 0x8586_8700),
            ("%al", 0),
            ("$-2", u64::MAX - 1),
        ] {
            assert_eq!(value(text), (Some(expected), None), "{text}");
        }
    }

    #[test]
    fn addresses_are_made_of_all_their_parts() {
        let r = distinct_registers();
        for (text, expected) in [
            ("8@(%rbx)", r.rbx),
            ("8@16(%rsp)", r.rsp.wrapping_add(16)),
            ("8@-80(%rbx)", r.rbx.wrapping_sub(80)),
            ("8@0x10(%rsp)", r.rsp.wrapping_add(16)),
            ("8@-4+8-20(%rsp)", r.rsp.wrapping_sub(16)),
            ("8@(%rax,%rcx)", r.rax.wrapping_add(r.rcx)),
            (
                "8@8(%rax,%rcx,4)",
                r.rax.wrapping_add(r.rcx.wrapping_mul(4)).wrapping_add(8),
            ),
            ("8@-8(,%r9,8)", r.r9.wrapping_mul(8).wrapping_sub(8)),
            ("8@(,%r9)", r.r9),
            ("8@(%rax,)", r.rax),
            (
                "8@(%eax,%ecx,2)",
                r.rax.wrapping_add(r.rcx.wrapping_mul(2)) & 0xffff_ffff,
            ),
            ("8@8(%rip)", r.rip.wrapping_add(8)),
            ("8@counter(%rip)", BIAS + 0x4010),
            ("8@counter+4(%rip)", BIAS + 0x4014),
            ("8@counter-4(%rip)", BIAS + 0x400c),
            ("8@counter+-4(%rip)", BIAS + 0x400c),
            ("8@4+counter(%rip)", BIAS + 0x4014),
            ("8@-4+counter(%rip)", BIAS + 0x400c),
            ("8@_ZN3one3twoE.lto_priv.0(%rip)", BIAS + 0x4020),
            ("8@counter", BIAS + 0x4010),
            (
                "8@counter+8(,%rcx,4)",
                (BIAS + 0x4018).wrapping_add(r.rcx.wrapping_mul(4)),
            ),
            ("8@4096", 4096),
            ("(%rbx)", r.rbx),
        ] {
            let expected = expected.into();
            assert_eq!(value(text).1, expected, "{text}");
        }
        assert_eq!(
            value("-4@0x7e(%rip)").0,
            Some(0xffff_ffff_9190_8f8e),
            "four bytes"
        );
        assert_eq!(value("1@counter(%rip)").0, Some(0x10));
        let gone = SiteArgument::parse("8@(%rbx)", &symbol);
        assert_eq!(gone.value(&r, 0, &|_, _| false), None, "not readable");
    }

    #[test]
    fn what_is_not_understood_says_why() {
        let syntax = |text: &str| ArgumentError::Syntax(text.to_owned());
        for (text, expected) in [
            ("16@%rax", ArgumentError::Size("16".into())),
            ("-3@%rax", ArgumentError::Size("-3".into())),
            ("8f@%xmm0", ArgumentError::Register("xmm0".into())),
            ("8@%st(1)", ArgumentError::Register("st(1)".into())),
            ("8@%fs:0x28", ArgumentError::Register("fs:0x28".into())),
            ("8@(%xmm0)", ArgumentError::Register("xmm0".into())),
            ("8@other(%rip)", ArgumentError::Symbol("other".into())),
            (".LC0(%rip)", ArgumentError::Symbol(".LC0".into())),
            ("8@", syntax("")),
            ("8@$", syntax("")),
            ("8@()", syntax("()")),
            ("8@8(%rax", syntax("8(%rax")),
            ("8@(%rax,%rbx,3)", syntax("(%rax,%rbx,3)")),
            ("8@(%rax,%rbx,2,1)", syntax("(%rax,%rbx,2,1)")),
            ("8@(rax)", syntax("rax")),
            ("8@(%al)", syntax("(%al)")),
            ("8@counter+counter(%rip)", syntax("counter+counter")),
            ("8@-counter(%rip)", syntax("-counter")),
            ("8@counter@GOTPCREL(%rip)", syntax("counter@GOTPCREL")),
            ("8@$18446744073709551616", syntax("18446744073709551616")),
            ("8@4+(%rip)", syntax("4+")),
        ] {
            let argument = SiteArgument::parse(text, &symbol);
            assert_eq!(argument.error(), Some(&expected), "{text}");
            assert_eq!(argument.text(), text);
            assert_eq!(value(text), (None, None), "{text}");
        }
        let long = SiteArgument::parse(&"x".repeat(5000), &symbol);
        assert_eq!(long.error(), Some(&ArgumentError::Long { found: 5000 }));
    }

    #[test]
    fn arguments_are_told_from_each_other_and_named_by_their_size() {
        let text = " -4@%edi 8@-16(%rbp)  16@%rax 1@$3 8f@(%rsp) 4f@%eax";
        let arguments = SiteArgument::parse_all(text, &symbol);
        let types: Vec<_> = arguments
            .iter()
            .map(|argument| argument.kind().map(ValueKind::type_name))
            .collect();
        let expected = ["int32_t", "uint64_t", "", "uint8_t", "double", "float"];
        assert_eq!(
            types,
            expected.map(|name| Some(name).filter(|n| !n.is_empty()))
        );
        let many = "8@%rax ".repeat(20);
        assert_eq!(SiteArgument::parse_all(&many, &symbol).len(), MAX_ARGUMENTS);
        let named: Vec<&str> =
            symbols_in("8@%rax 4@one+4(%rip) 8@two.0(,%rcx,8) 8@$three").collect();
        for name in ["one", "two.0", "three"] {
            assert!(named.contains(&name), "{named:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_harm(
            text in "[-+$%@(),.0-9a-fx_ risplbq]{0,60}",
            bias: u64,
        ) {
            for argument in SiteArgument::parse_all(&text, &|name| Some(name.len() as u64)) {
                let _ = argument.value(&distinct_registers(), bias, &|_, _| true);
                // What is understood has a size.
                prop_assert!(argument.error().is_some() || argument.kind().is_some());
            }
        }

        #[test]
        fn any_bytes_are_read_without_harm(text in ".{0,60}") {
            let _ = SiteArgument::parse_all(&text, &symbol);
        }
    }
}
