//! The sections, read again as a debugger reads them.
#![allow(clippy::unwrap_used)]
use gimli::{AttributeValue, EndianSlice, LittleEndian, UnitOffset};

use super::*;

type Slice<'d> = EndianSlice<'d, LittleEndian>;

const TEXT: Range<u64> = 0x1000..0x3000;
const FALL: Code = Code {
    id: TypeId(12),
    start: 0x2000,
    size: 64,
    kept: 0x2005,
};

/// Names, and their offsets.
const NAMES: &[u8] = b"\0int\0pair\0a\0next\0self\0sign\0MINUS\0flags\0on\0u\0";
const INT: u32 = 1;
const PAIR: u32 = 5;
const A: u32 = 10;
const NEXT: u32 = 12;
const SELF: u32 = 17;
const SIGN: u32 = 22;
const MINUS: u32 = 27;
const FLAGS: u32 = 33;
const ON: u32 = 39;
const U: u32 = 42;

/// Returns the word with a type's kind (`BTF_KIND_*`), number of members and flag.
const fn info(kind: u32, members: u32, flag: bool) -> u32 {
    (flag as u32) << 31 | kind << 24 | members
}

/// Returns BTF with types of these words.
fn btf(types: &[&[u32]], names: &[u8]) -> Btf {
    let types: Vec<u8> = types
        .concat()
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .collect();
    let (length, strings) = (types.len() as u32, names.len() as u32);
    let mut bytes = vec![0x9f, 0xeb, 1, 0];
    for word in [24, 0, length, length, strings] {
        bytes.extend(u32::to_le_bytes(word));
    }
    bytes.extend(types);
    bytes.extend(names);
    Btf::parse(&bytes).unwrap()
}

/// Returns a line for each entry: its depth, tag, and attributes. A type is shown by its name
/// or tag.
fn shown(sections: &Sections) -> Vec<String> {
    let part = |id| -> Result<Slice<'_>, gimli::Error> {
        Ok(EndianSlice::new(
            match id {
                gimli::SectionId::DebugInfo => &sections.info,
                gimli::SectionId::DebugAbbrev => &sections.abbreviations,
                gimli::SectionId::DebugStr => &sections.strings,
                gimli::SectionId::DebugLoc => &sections.places,
                _ => &[],
            },
            LittleEndian,
        ))
    };
    let dwarf = gimli::Dwarf::load(part).unwrap();
    let header = dwarf.units().next().unwrap().unwrap();
    let unit = dwarf.unit(header).unwrap();
    let text = |value| {
        dwarf
            .attr_string(&unit, value)
            .unwrap()
            .to_string()
            .unwrap()
    };
    let type_at = |at: UnitOffset| {
        let entry = unit.entry(at).unwrap();
        let name = entry.attr_value(constants::DW_AT_name);
        name.map_or(entry.tag().to_string(), |name| text(name).to_owned())
    };
    let mut lines = Vec::new();
    let mut entries = unit.entries();
    while let Some(entry) = entries.next_dfs().unwrap() {
        let depth = usize::try_from(entry.depth()).unwrap();
        let mut line = " ".repeat(depth) + entry.tag().static_string().unwrap();
        for attribute in entry.attrs() {
            line += &match attribute.value() {
                AttributeValue::UnitRef(at) => format!(" -> {}", type_at(at)),
                AttributeValue::DebugStrRef(_) | AttributeValue::String(_) => {
                    format!(" {:?}", text(attribute.value()))
                }
                AttributeValue::Addr(address) => format!(" {address:#x}"),
                AttributeValue::LocationListsRef(at) => {
                    let mut places = dwarf.raw_locations(&unit, at).unwrap();
                    let place = places.next().unwrap().unwrap();
                    let gimli::RawLocListEntry::AddressOrOffsetPair { begin, end, data } = place
                    else {
                        panic!("{place:?}")
                    };
                    assert!(places.next().unwrap().is_none());
                    format!(" {begin:#x}..{end:#x} {:x}", data.0.slice()[0])
                }
                AttributeValue::Encoding(encoding) => format!(" {encoding}"),
                AttributeValue::Language(language) => format!(" {language}"),
                value => match (value.sdata_value(), value.udata_value()) {
                    (Some(number), _) => format!(" {number}"),
                    (None, Some(number)) => format!(" {number}"),
                    (None, None) => format!(" {}", attribute.name()),
                },
            };
        }
        lines.push(line.replace("DW_TAG_", "").replace("DW_AT_", ""));
    }
    lines
}

#[test]
fn types_are_entries_of_one_unit() {
    let types: &[&[u32]] = &[
        &[INT, info(1, 0, false), 4, 1 << 24 | 32],
        &[0, info(2, 0, false), 3],
        &[PAIR, info(4, 2, false), 16, A, 6, 0, NEXT, 2, 64],
        // A typedef of itself.
        &[SELF, info(8, 0, false), 4],
        &[SIGN, info(6, 1, true), 4, MINUS, u32::MAX],
        // Behind a tag: int.
        &[0, info(18, 0, false), 1],
        &[0, info(4, 2, true), 4, FLAGS, 1, 0, ON, 1, 3 << 24 | 5],
        &[0, info(3, 0, false), 0, 4, 1, 8],
        &[0, info(13, 2, false), 0, 0, 2, 0, 0],
        &[U, info(7, 0, true), 0],
        &[0, info(10, 0, false), 9999],
        // The function of the prototype.
        &[NEXT, info(12, 1, false), 9],
    ];
    let found = shown(&sections(&btf(types, NAMES), TEXT, &[FALL]).unwrap());
    let expected = [
        "compile_unit \"exotrace\" DW_LANG_C99 \"vmlinux\" 0x1000 8192",
        " unspecified_type \"void\"",
        " base_type \"int\" 4 DW_ATE_signed",
        " pointer_type 8 -> pair",
        " structure_type \"pair\" 16",
        "  member \"a\" -> int 0",
        "  member \"next\" -> pointer_type 8",
        " typedef \"self\" -> void",
        " enumeration_type \"sign\" 4",
        "  enumerator \"MINUS\" -1",
        " structure_type 4",
        "  member \"flags\" -> int 0",
        "  member \"on\" -> int 5 3",
        " array_type -> void",
        "  subrange_type 8",
        " subroutine_type prototyped -> void",
        "  formal_parameter -> pointer_type",
        "  unspecified_parameters",
        " union_type \"u\" declaration",
        " const_type -> void",
        " subprogram \"next\" 0x2000 64 prototyped -> void",
        "  formal_parameter \"\" -> pointer_type 0x1000..0x1005 55",
        "  unspecified_parameters",
    ];
    assert_eq!(found, expected);
}

#[test]
fn names_that_are_cut_off_or_outside_are_read_as_far_as_they_go() {
    let types: &[&[u32]] = &[
        &[1, info(1, 0, false), 4, 32],
        &[9999, info(1, 0, false), 4, 32],
    ];
    let found = shown(&sections(&btf(types, b"\0un"), TEXT, &[]).unwrap());
    let expected = [
        " base_type \"un\" 4 DW_ATE_unsigned",
        " base_type \"\" 4 DW_ATE_unsigned",
    ];
    assert_eq!(found.get(2..).unwrap(), expected);
}
