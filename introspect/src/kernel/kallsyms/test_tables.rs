//! A writer of kallsyms tables for tests, in every layout that the decoder reads.
#![allow(clippy::unwrap_used)]

use super::Layout;

/// A symbol, as written and as expected back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TestSymbol {
    pub(crate) address: u64,
    pub(crate) kind: u8,
    pub(crate) name: String,
}

/// The differences between kernels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Variant {
    pub(crate) layout: Layout,
    /// Whether `kallsyms_seqs_of_names` is present.
    pub(crate) sequences: bool,
    /// Whether per-CPU symbols are absolute.
    pub(crate) absolute_per_cpu: bool,
}

pub(crate) const BASE: u64 = 0xffff_ffff_8100_0000;
/// The address of the first byte of [`write`]'s result.
pub(crate) const START: u64 = BASE + 0x120_0000;

/// Makes `count` symbols with plausible names; the first tenth are per-CPU if `per_cpu`.
pub(crate) fn kernel_like(count: usize, per_cpu: bool) -> Vec<TestSymbol> {
    (0..count)
        .map(|i| {
            let in_per_cpu = per_cpu && i < count / 10;
            let (address, kind) = match (in_per_cpu, i % 5) {
                (true, _) => (i as u64 * 8, b'A'),
                (false, 4) => (BASE + i as u64 * 0x35, b'd'),
                // Every other pair shares its address.
                (false, _) => (BASE + (i as u64 & !1) * 0x35, b'T'),
            };
            let name = format!("sys_do_read_{}_{i}", ["open", "task", "inode", "x"][i % 4]);
            TestSymbol {
                address,
                kind,
                name,
            }
        })
        .collect()
}

/// Makes tokens of several characters, at indices whose characters no name uses.
fn pieces() -> Vec<String> {
    let mut tokens: Vec<String> = (0..=255u8)
        .map(|c| match c {
            b'!'..=b'~' => char::from(c).to_string(),
            _ => String::new(),
        })
        .collect();
    for (index, piece) in ["sys_", "do_", "read_", "_task", "Tsys_do_read_", "__"]
        .iter()
        .enumerate()
    {
        tokens[200 + index] = (*piece).to_owned();
    }
    tokens
}

/// Compresses greedily, by the longest piece that matches.
fn compress(text: &str, pieces: &[String]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (token, piece) = (0..=255u8)
            .zip(pieces)
            .filter(|(_, piece)| !piece.is_empty() && rest.starts_with(piece.as_str()))
            .max_by_key(|(_, piece)| piece.len())
            .unwrap();
        out.push(token);
        rest = &rest[piece.len()..];
    }
    out
}

fn align_to(boundary: usize, bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(boundary), 0);
}

/// Writes the tables among other bytes, of which the first is at [`START`].
pub(crate) fn write(symbols: &[TestSymbol], variant: Variant) -> Vec<u8> {
    write_at(START, symbols, variant)
}

/// Writes the same with the first byte at `start`.
pub(crate) fn write_at(start: u64, symbols: &[TestSymbol], variant: Variant) -> Vec<u8> {
    let boundary = match variant.layout {
        Layout::AddressesFirst | Layout::AddressesLast => 8,
        Layout::AddressesFromEntries => 4,
    };
    let align = |bytes: &mut Vec<u8>| align_to(boundary, bytes);
    let pieces = pieces();
    let mut out: Vec<u8> = (0..4096u32)
        .flat_map(|i| (i.wrapping_mul(2_654_435_761)).to_le_bytes())
        .collect();
    let addresses = |out: &mut Vec<u8>| {
        align(out);
        for symbol in symbols {
            let relative = symbol.address.wrapping_sub(BASE) as u32;
            let value = match variant.absolute_per_cpu {
                _ if variant.layout == Layout::AddressesFromEntries => {
                    let entry = start + out.len() as u64;
                    symbol.address.wrapping_sub(entry) as u32
                }
                true if symbol.address < BASE => symbol.address as u32,
                true => !relative,
                false => relative,
            };
            out.extend(value.to_le_bytes());
        }
        if variant.layout != Layout::AddressesFromEntries {
            align(out);
            out.extend(BASE.to_le_bytes());
        }
    };
    let sequences = |out: &mut Vec<u8>| {
        align(out);
        for i in 0..symbols.len() as u32 {
            out.extend(&i.to_be_bytes()[1..]);
        }
    };
    if variant.layout == Layout::AddressesFirst {
        addresses(&mut out);
    }
    align(&mut out);
    out.extend((symbols.len() as u32).to_le_bytes());
    align(&mut out);
    let names = out.len();
    let mut markers = Vec::new();
    for (index, symbol) in symbols.iter().enumerate() {
        if index % 256 == 0 {
            markers.push((out.len() - names) as u32);
        }
        let packed = compress(
            &format!("{}{}", char::from(symbol.kind), symbol.name),
            &pieces,
        );
        match packed.len() {
            length @ 0..=0x7f => out.push(length as u8),
            length => out.extend([length as u8 | 0x80, (length >> 7) as u8]),
        }
        out.extend(packed);
    }
    align(&mut out);
    out.extend(markers.iter().flat_map(|marker| marker.to_le_bytes()));
    if variant.layout == Layout::AddressesFirst && variant.sequences {
        sequences(&mut out);
    }
    align(&mut out);
    let table = out.len();
    let mut index = Vec::new();
    for piece in &pieces {
        index.extend(((out.len() - table) as u16).to_le_bytes());
        out.extend(piece.bytes());
        out.push(0);
    }
    align(&mut out);
    out.extend(index);
    if variant.layout != Layout::AddressesFirst {
        addresses(&mut out);
        if variant.sequences {
            sequences(&mut out);
        }
    }
    out.extend([0x5a; 512]);
    out
}
