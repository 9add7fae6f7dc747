//! The boundaries of instructions: a breakpoint inside of one would change another instruction.

use iced_x86::{Decoder, DecoderOptions};

/// The number of bytes that are decoded at once.
const PIECE: usize = 4096;
/// The largest number of bytes from the start of a function that are decoded.
const MOST: u64 = 1 << 20;
/// The length of the longest instruction in bytes.
const LONGEST: usize = 15;

/// Checks whether an instruction begins at `address` of the function at `start`, whose code is read
/// by `read`.
pub(super) fn is_at(start: u64, address: u64, read: impl Fn(u64, &mut [u8]) -> usize) -> bool {
    if address
        .checked_sub(start)
        .is_none_or(|offset| offset > MOST)
    {
        return false;
    }
    let mut at = start;
    let mut code = [0; PIECE];
    while at < address {
        let read = read(at, &mut code);
        let code = code.get(..read).unwrap_or_default();
        let mut decoder = Decoder::with_ip(64, code, at, DecoderOptions::NONE);
        let from = at;
        while at < address {
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                // The piece may end within it.
                let left = code
                    .len()
                    .saturating_sub(usize::try_from(at - from).unwrap_or(PIECE));
                if left >= LONGEST || at == from {
                    return false;
                }
                break;
            }
            at = instruction.next_ip();
        }
    }
    at == address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_bytes_of_instructions_are_boundaries() {
        // push rbp; mov rbp, rsp; call; many times nop; ret
        let mut code = vec![0x55, 0x48, 0x89, 0xe5, 0xe8, 0, 0, 0, 0];
        code.resize(2 * PIECE, 0x90);
        // An instruction across the border of the pieces.
        code.splice(PIECE - 2..PIECE + 3, [0xe8, 0, 0, 0, 0]);
        let start = 0xffff_ffff_8100_0000;
        let read = |at: u64, buf: &mut [u8]| {
            let rest = code.get((at - start) as usize..).unwrap_or_default();
            buf.iter_mut()
                .zip(rest)
                .for_each(|(place, byte)| *place = *byte);
            rest.len().min(buf.len())
        };
        let border = PIECE as u64 - 2;
        for (offset, expected) in [
            (0, true),
            (1, true),
            (2, false),
            (4, true),
            (5, false),
            (9, true),
            (border, true),
            (border + 1, false),
            (border + 5, true),
            (2 * PIECE as u64 - 1, true),
            (2 * PIECE as u64 + 1, false),
            (MOST + 1, false),
        ] {
            assert_eq!(is_at(start, start + offset, read), expected, "{offset}");
        }
        assert!(!is_at(start, start - 1, read));
    }
}
