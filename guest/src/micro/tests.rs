//! Checks what users of the micro guest rely on: a readable ELF file, sane symbols, decodable code,
//! the same bytes every time.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use iced_x86::{Decoder, DecoderOptions, Mnemonic};
use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol, SymbolKind};

use super::layout::USER_TEXT;
use super::*;

#[test]
fn the_same_bytes_every_time_and_few() {
    let first = elf();
    assert_eq!(first, elf());
    assert!(first.len() < 64 * 1024, "{} bytes", first.len());
}

#[test]
fn segments_lie_where_the_boot_protocol_wants_them() {
    let bytes = elf();
    let file = object::File::parse(&*bytes).unwrap();
    let segments: Vec<_> = file.segments().map(|s| (s.address(), s.size())).collect();
    assert_eq!(segments[0].0, 0x10_0000);
    assert_eq!(segments.len(), 2);
    assert!(segments[0].0 + segments[0].1 <= segments[1].0);
    assert!(segments[1].0 + segments[1].1 <= 2 << 20);
    assert_eq!(file.entry(), 0x10_0000);
}

#[test]
fn every_symbol_is_inside_its_section_and_none_overlap() {
    let bytes = elf();
    let file = object::File::parse(&*bytes).unwrap();
    let mut ranges = BTreeMap::new();
    for symbol in file.symbols() {
        let name = symbol.name().unwrap();
        assert!(name.starts_with("micro_"), "{name}");
        assert!(symbol.size() > 0, "{name} is empty");
        let section = file
            .section_by_index(symbol.section_index().unwrap())
            .unwrap();
        let (kind, in_file) = match section.name().unwrap() {
            ".text" => (SymbolKind::Text, true),
            _ => (SymbolKind::Data, false),
        };
        assert_eq!(symbol.kind(), kind, "{name}");
        assert!(symbol.address() >= section.address(), "{name}");
        let end = symbol.address() + symbol.size();
        assert!(
            !in_file || end <= section.address() + section.size(),
            "{name}"
        );
        assert!(
            ranges.insert(symbol.address(), (end, name)).is_none(),
            "{name}"
        );
    }
    let list: Vec<_> = ranges.into_iter().collect();
    for pair in list.windows(2) {
        assert!(
            pair[0].1.0 <= pair[1].0,
            "{} overlaps {}",
            pair[0].1.1,
            pair[1].1.1
        );
    }
}

#[test]
fn all_code_decodes_and_ends_at_symbol_borders() {
    let bytes = elf();
    let file = object::File::parse(&*bytes).unwrap();
    let text = file.section_by_name(".text").unwrap();
    let mut functions = 0;
    for symbol in file.symbols().filter(|s| s.kind() == SymbolKind::Text) {
        let code = text
            .data_range(symbol.address(), symbol.size())
            .unwrap()
            .unwrap();
        let mut decoder = Decoder::with_ip(64, code, symbol.address(), DecoderOptions::NONE);
        for instruction in &mut decoder {
            assert_ne!(
                instruction.mnemonic(),
                Mnemonic::INVALID,
                "{}",
                symbol.name().unwrap()
            );
        }
        assert_eq!(
            decoder.ip(),
            symbol.address() + symbol.size(),
            "{}",
            symbol.name().unwrap()
        );
        functions += 1;
    }
    assert!(functions > 40, "{functions}");
}

#[test]
fn step_is_a_straight_line_of_24_instructions() {
    let bytes = elf();
    let file = object::File::parse(&*bytes).unwrap();
    let symbol = file.symbol_by_name("micro_step").unwrap();
    let text = file.section_by_name(".text").unwrap();
    let code = text
        .data_range(symbol.address(), symbol.size())
        .unwrap()
        .unwrap();
    let instructions: Vec<_> = Decoder::with_ip(64, code, symbol.address(), 0)
        .iter()
        .collect();
    assert_eq!(instructions.len(), 24);
    let (last, line) = instructions.split_last().unwrap();
    assert_eq!(last.mnemonic(), Mnemonic::Ret);
    assert!(
        line.iter()
            .all(|i| i.flow_control() == iced_x86::FlowControl::Next)
    );
}

#[test]
fn user_pages_are_the_text_page_the_stack_the_samples_and_the_device() {
    let tables = tables::page_tables();
    let low = &tables[(layout::PT_LOW - PML4) as usize / 8..][..512];
    let user: Vec<u64> = (0..512)
        .filter(|&index| low[index as usize] & 5 == 5)
        .map(|index| index * PAGE)
        .collect();
    let samples = (layout::SAMPLES..layout::MEMORY_END).step_by(PAGE as usize);
    let expected: Vec<u64> = [USER_TEXT, layout::USER_STACK]
        .into_iter()
        .chain(samples)
        .collect();
    assert_eq!(user, expected);
    let absent: Vec<u64> = (0..512)
        .filter(|&index| low[index as usize] & 1 == 0)
        .map(|index| index * PAGE)
        .collect();
    assert_eq!(absent, layout::HOLES);
}

#[test]
fn gates_hold_their_handler_and_only_int3_is_open_to_users() {
    let handlers = std::array::from_fn(|number| 0x1234_5678_9abc_def0 + number as u64);
    let gates = tables::idt(&handlers);
    assert_eq!(gates.len(), 512);
    let mut open_to_users = Vec::new();
    for (number, gate) in gates.chunks(2).enumerate() {
        let address = gate[0] & 0xffff | (gate[0] >> 48) << 16 | gate[1] << 32;
        assert_eq!(address, handlers[number]);
        if gate[0] >> 45 & 3 == 3 {
            open_to_users.push(number);
        }
    }
    assert_eq!(open_to_users, [3]);
}

#[test]
fn program_names_are_unique_and_fit_their_slots() {
    let names: std::collections::BTreeSet<_> = programs().collect();
    assert_eq!(names.len(), programs::PROGRAMS.len());
    assert!(
        names
            .iter()
            .all(|name| name.len() <= data::KEY_SIZE as usize)
    );
}
