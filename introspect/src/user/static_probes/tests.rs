#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use object::elf;

use super::notes::writing::{content, note};
use super::*;
use crate::user::symfs::HostFile;
use crate::user::test_object::{TEXT, TestObject};

/// Objects with sites on the building machine. The linker itself needs the first one.
const WITH_SITES: [&str; 3] = [
    "/usr/lib/x86_64-linux-gnu/libstdc++.so.6",
    "/usr/bin/x86_64-linux-gnu-gcc-12",
    "/usr/lib/x86_64-linux-gnu/libpython3.11.so.1.0",
];

/// Returns provider, name, location with semaphore, and arguments, a line each.
fn by_readelf(path: &Path) -> Vec<[String; 4]> {
    let output = Command::new("readelf")
        .arg("-n")
        .arg(path)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut found: Vec<[String; 4]> = Vec::new();
    for line in text.lines().map(str::trim) {
        let Some((key, value)) = line.split_once(':') else {
            continue;
        };
        let value = value.trim().to_owned();
        let part = match key {
            "Provider" => {
                found.push(std::array::from_fn(|_| String::new()));
                0
            }
            "Name" => 1,
            "Location" => 2,
            "Arguments" => 3,
            _ => continue,
        };
        found.last_mut().unwrap()[part] = value;
    }
    found
}

#[test]
fn readelf_sees_the_same_sites() {
    let mut seen = 0;
    for path in WITH_SITES.map(Path::new) {
        if !path.exists() && seen > 0 {
            continue;
        }
        let file = HostFile::open(path).unwrap();
        let object = ObjectFile::parse(&file).unwrap();
        let found = StaticSites::read(&object);
        assert_eq!(found.lost, [], "{}", path.display());
        let base = object.section(BASE).map_or(0, |section| section.address);
        let ours: Vec<[String; 4]> = found
            .sites
            .iter()
            .map(|site| {
                let arguments: Vec<&str> = site.arguments.iter().map(SiteArgument::text).collect();
                let semaphore = site.semaphore.map_or(0, |semaphore| semaphore.address);
                [
                    site.provider.clone(),
                    site.name.clone(),
                    format!(
                        "{:#018x}, Base: {base:#018x}, Semaphore: {semaphore:#018x}",
                        site.address
                    ),
                    arguments.join(" "),
                ]
            })
            .collect();
        assert_eq!(ours, by_readelf(path), "{}", path.display());
        assert!(!ours.is_empty(), "{}", path.display());
        for site in &found.sites {
            let errors: Vec<_> = site
                .arguments
                .iter()
                .filter_map(SiteArgument::error)
                .collect();
            assert_eq!(errors, Vec::<&ArgumentError>::new(), "{site:?}");
            // The site has a NOP, and the counter is 0.
            let read = |offset: Option<u64>, length: usize| {
                let mut bytes = vec![0xee; length];
                use crate::user::file_bytes::FileBytes;
                file.read_at(offset.unwrap(), &mut bytes).unwrap();
                bytes
            };
            assert_eq!(read(site.offset, 1), [0x90], "{site:?}");
            if let Some(semaphore) = site.semaphore {
                assert_eq!(read(semaphore.offset, 2), [0, 0], "{site:?}");
            }
        }
        seen += ours.len();
    }
}

/// Builds an object whose `.stapsdt.base` has moved from 0x2000 to 0x2100 since it was linked.
fn moved(notes: &[Vec<u8>], own: &[Vec<u8>]) -> Vec<u8> {
    let variable = |name, binding, address| (name, elf::STT_OBJECT, binding, address, 8);
    TestObject::library()
        .full(&[
            variable("counter", elf::STB_LOCAL, 0x4010),
            variable("twice", elf::STB_LOCAL, 0x4020),
            variable("twice", elf::STB_LOCAL, 0x4030),
            variable("exported", elf::STB_LOCAL, 0x4040),
            variable("exported", elf::STB_GLOBAL, 0x4050),
            ("thread", elf::STT_TLS, elf::STB_GLOBAL, 0x8, 8),
        ])
        .section(NOTES, 0, &notes.concat())
        .section(BASE, 0x2100, b"\0")
        .section(OWN_NOTES, 0, &own.concat())
        .bytes()
}

fn stapsdt(address: u64, semaphore: u64, strings: [&str; 3]) -> Vec<u8> {
    note(
        "stapsdt",
        3,
        &content(&[address, 0x2000, semaphore], &strings),
    )
}

#[test]
fn sites_move_with_their_object_and_have_the_names_that_were_declared() {
    let name = |function, name| ["net", "mod", function, name];
    let notes = [
        stapsdt(
            TEXT - 0x100,
            0,
            ["net", "state__change", "4@counter(%rip) 8@%rdi"],
        ),
        stapsdt(TEXT - 0xf0, 0x3000, ["net", "plain", ""]),
        stapsdt(0xdead_0000, 0, ["net", "nowhere", ""]),
    ];
    let own = [
        note(
            "exotrace",
            1,
            &content(
                &[],
                &[
                    &name("send", "state-change")[..],
                    &["int", "", "s *", "i *"],
                ]
                .concat(),
            ),
        ),
        note(
            "exotrace",
            2,
            &content(&[TEXT - 0x100, 0x2000], &name("send", "other")),
        ),
        note(
            "exotrace",
            2,
            &content(&[TEXT - 0x100, 0x2000], &name("send", "state-change")),
        ),
        note(
            "exotrace",
            2,
            &content(&[TEXT - 0xf0, 0x2000], &name("", "plain")),
        ),
    ];
    let bytes = moved(&notes, &own);
    let bytes = bytes.as_slice();
    let found = StaticSites::read(&ObjectFile::parse(&bytes).unwrap());
    assert_eq!(found.lost, []);
    let [change, plain, nowhere] = found.sites.as_slice() else {
        panic!("{found:?}")
    };
    assert_eq!((change.address, change.offset), (TEXT, Some(TEXT)));
    assert_eq!(change.declared.as_ref().unwrap().function, "send");
    let natives: Vec<_> = change.types.iter().flatten().map(|t| &*t.native).collect();
    assert_eq!(natives, ["int", "s *"]);
    let semaphore = Semaphore {
        address: 0x3100,
        offset: None,
    };
    assert_eq!(
        (plain.address, plain.semaphore),
        (TEXT + 0x10, Some(semaphore))
    );
    // Its types are not declared.
    assert_eq!((plain.declared.is_some(), &plain.types), (true, &None));
    assert_eq!((nowhere.offset, &nowhere.declared), (None, &None));
}

/// The maximum number of notes, which an object made to waste time may have. A search for each
/// would take minutes.
#[test]
fn many_notes_of_one_place_are_no_burden() {
    let name = |number: usize| format!("n{number}");
    let sites: Vec<Vec<u8>> = (0..notes::MAX_NOTES)
        .map(|number| stapsdt(TEXT, 0, ["p", &name(number), ""]))
        .collect();
    let own: Vec<Vec<u8>> = (0..notes::MAX_NOTES)
        .map(|number| {
            let strings = ["p", "m", "f", &name(number)];
            note("exotrace", 2, &content(&[TEXT, 0x2000], &strings))
        })
        .collect();
    let bytes = moved(&sites, &own);
    let bytes = bytes.as_slice();
    let found = StaticSites::read(&ObjectFile::parse(&bytes).unwrap());
    assert_eq!(found.sites.len(), notes::MAX_NOTES);
    let last = found.sites.last().unwrap();
    let declared = last.declared.as_ref().unwrap();
    assert_eq!(declared.name, name(notes::MAX_NOTES - 1));
}

#[test]
fn symbols_are_found_if_they_are_one() {
    let arguments =
        "8@counter(%rip) 8@twice(%rip) 8@exported(%rip) 8@thread(%rip) 8@4+counter(%rip)";
    let bytes = moved(&[stapsdt(TEXT, 0, ["p", "n", arguments])], &[]);
    let bytes = bytes.as_slice();
    let found = StaticSites::read(&ObjectFile::parse(&bytes).unwrap());
    let registers = crate::x86_64::GeneralRegisters::default();
    let addresses: Vec<Option<u64>> = found.sites[0]
        .arguments
        .iter()
        .map(|argument| {
            let asked = std::cell::Cell::new(None);
            let _ = argument.value(&registers, 0x10_0000, &|address, _| {
                asked.set(Some(address));
                true
            });
            asked.get()
        })
        .collect();
    let expected = [
        Some(0x10_4010),
        None,
        Some(0x10_4050),
        None,
        Some(0x10_4014),
    ];
    assert_eq!(addresses, expected);
}

#[test]
fn what_cannot_be_read_is_told() {
    let cut = stapsdt(TEXT, 0, ["p", "n", ""]);
    let damaged = moved(&[cut[..cut.len() - 8].to_vec()], &[]);
    let headless = TestObject::library().section(NOTES, 0, &cut).bytes();
    let large = TestObject::library()
        .section(NOTES, 0, &vec![0; 9 << 20])
        .bytes();
    for (bytes, sites, lost) in [(damaged, 0, 1), (headless, 1, 0), (large, 0, 1)] {
        let bytes = bytes.as_slice();
        let found = StaticSites::read(&ObjectFile::parse(&bytes).unwrap());
        assert_eq!(
            (found.sites.len(), found.lost.len()),
            (sites, lost),
            "{found:?}"
        );
    }
    let none = TestObject::library().bytes();
    let none = none.as_slice();
    let found = StaticSites::read(&ObjectFile::parse(&none).unwrap());
    assert_eq!(found, StaticSites::default());
}

/// The example of probes/sdt in C, whose first probe has the manual page's `sname`.
#[test]
fn a_site_has_the_name_and_types_of_its_definition() {
    let bytes: &[u8] = include_bytes!("../../../fuzz/seeds/elf/probes");
    let object = ObjectFile::parse(&bytes).unwrap();
    let sites = StaticSites::read(&object).sites;
    let found: Vec<_> = sites
        .iter()
        .map(|site| {
            let declared = site.declared.as_ref().map(|d| (&*d.function, &*d.name));
            let types = site.types.iter().flatten();
            let types: Vec<_> = types
                .map(|t| (&*t.native, t.translated.as_deref()))
                .collect();
            (&*site.name, declared, types)
        })
        .collect();
    let icmp = "struct icmp *";
    assert_eq!(
        found,
        [
            (
                "pkt_receive",
                Some(("unreach", "pkt-receive")),
                vec![(icmp, None), ("unsigned long", None)]
            ),
            (
                "receive",
                Some(("", "receive")),
                vec![(icmp, Some("struct icmp_hdr_dt *"))]
            ),
        ]
    );
}
