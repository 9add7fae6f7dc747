//! Parses the output of `pahole --expand_types`: structs and unions with the offset and size of
//! every member, embedded structs included.
//!
//! All offsets are from the start of the outermost struct. Members of anonymous structs and unions
//! are named as in C.

use std::collections::{BTreeMap, BTreeSet};

/// A member of a struct, of those embedded in it, or of an anonymous struct in it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Member {
    /// The name; empty for an anonymous struct or union.
    pub name: String,
    /// The offset in the outermost struct, in bits.
    pub bit_offset: u64,
    /// The size in bytes; for a bitfield, that of its type.
    pub size: u64,
    /// Whether the member is a bitfield.
    pub bitfield: bool,
    /// The members of this member.
    pub members: Vec<Member>,
}

#[derive(Default)]
struct Structure {
    /// The size in bytes; unions are printed without.
    size: Option<u64>,
    members: Vec<Member>,
}

/// A kernel's structs and unions by name.
pub struct Structures {
    by_name: BTreeMap<String, Structure>,
    /// The names that several structs or unions share.
    namesakes: BTreeSet<String>,
}

impl Structures {
    /// Parses pahole's output.
    ///
    /// # Panics
    /// If it is not as expected.
    pub fn parse(text: &str) -> Self {
        let (mut by_name, mut namesakes) = (BTreeMap::new(), BTreeSet::new());
        // The members read so far of each open struct, from the outermost inwards.
        let mut open: Vec<Vec<Member>> = Vec::new();
        let (mut outermost, mut size) = (String::new(), None);
        for line in text.lines() {
            let line = line.trim();
            if let Some(start) = line.strip_suffix('{') {
                if open.is_empty() {
                    outermost = start.split(' ').nth(1).unwrap_or_default().to_owned();
                }
                open.push(Vec::new());
            } else if let Some(end) = line.strip_prefix('}') {
                let members = open
                    .pop()
                    .unwrap_or_else(|| panic!("{line:?} ends nothing"));
                match open.last_mut() {
                    None => {
                        let name = std::mem::take(&mut outermost);
                        let size = size.take();
                        let structure = Structure { size, members };
                        if by_name.insert(name.clone(), structure).is_some() {
                            namesakes.insert(name);
                        }
                    }
                    Some(around) => {
                        let member = member(end).unwrap_or_else(|| panic!("{line:?} has no place"));
                        // No path leads into an array or through a pointer.
                        let declaration = end.split("/*").next().unwrap_or_default();
                        let members = match declaration.contains(['[', '*']) {
                            true => Vec::new(),
                            false => members,
                        };
                        around.push(Member { members, ..member });
                    }
                }
            } else if let (Some(told), 1) = (line.strip_prefix("/* size: "), open.len()) {
                size = told.split(',').next().and_then(|told| told.parse().ok());
            } else if let (Some(around), Some(member)) = (open.last_mut(), member(line)) {
                // A member without a name and without members is padding.
                if !member.name.is_empty() {
                    around.push(member);
                }
            }
        }
        assert!(open.is_empty(), "{outermost} does not end");
        by_name.retain(|name, _| !namesakes.contains(name));
        Self { by_name, namesakes }
    }

    /// Returns the names that several structs or unions share, each in source files of its own.
    /// Nothing else is reported of them.
    #[must_use]
    pub fn namesakes(&self) -> &BTreeSet<String> {
        &self.namesakes
    }

    /// Returns whether there is exactly one struct or union of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Returns the number of structs and unions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Returns the size of every struct in bytes.
    pub fn sizes(&self) -> impl Iterator<Item = (&str, u64)> {
        let structures = self.by_name.iter();
        structures.filter_map(|(name, structure)| Some((name.as_str(), structure.size?)))
    }

    /// Returns the member at a path such as `task_struct.se.vruntime`.
    #[must_use]
    pub fn find(&self, path: &str) -> Option<&Member> {
        let mut parts = path.split('.');
        let mut members = &self.by_name.get(parts.next()?)?.members;
        let mut found = None;
        for part in parts {
            let member = named(members, part)?;
            members = &member.members;
            found = Some(member);
        }
        found
    }

    /// Returns every member that has a path, with its path.
    pub fn paths(&self) -> impl Iterator<Item = (String, &Member)> {
        self.by_name.iter().flat_map(|(name, structure)| {
            let mut paths = Vec::new();
            collect(name, &structure.members, &mut paths);
            paths
        })
    }
}

/// Returns the member of this name, as C finds it.
fn named<'a>(members: &'a [Member], name: &str) -> Option<&'a Member> {
    members.iter().find_map(|member| {
        if member.name == name {
            return Some(member);
        }
        let anonymous = member.name.is_empty().then_some(&member.members)?;
        named(anonymous, name)
    })
}

fn collect<'a>(path: &str, members: &'a [Member], paths: &mut Vec<(String, &'a Member)>) {
    for member in members {
        if member.name.is_empty() {
            collect(path, &member.members, paths);
        } else {
            let path = format!("{path}.{}", member.name);
            collect(&path, &member.members, paths);
            paths.push((path, member));
        }
    }
}

/// Parses `int  counter;  /*  64  4 */`, or the text after a closing brace; `None` for a line that
/// is a comment only. A bitfield's offset has its bit behind a colon: `/*  4: 8  4 */`.
fn member(line: &str) -> Option<Member> {
    let (declaration, place) = line.strip_suffix("*/")?.rsplit_once("/*")?;
    let (byte, rest) = place.trim().split_once([':', ' '])?;
    let bitfield = place.contains(':');
    let mut numbers = rest.split_whitespace().map(str::parse::<u64>);
    let bit = match bitfield {
        true => numbers.next()?.ok()?,
        false => 0,
    };
    let size = numbers.next()?.ok()?;
    Some(Member {
        name: declared(declaration),
        bit_offset: byte.parse::<u64>().ok()? * 8 + bit,
        size,
        bitfield,
        members: Vec::new(),
    })
}

/// Returns the name that a declaration declares; empty if it is anonymous.
fn declared(declaration: &str) -> String {
    let plain = without_attributes(declaration);
    let plain = plain.trim().trim_end_matches(';').trim_end();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    // A pointer to a function or to an array.
    if let Some((_, rest)) = plain.split_once("(*") {
        let rest = rest.trim_start_matches(['*', ' ']);
        return rest.chars().take_while(|c| is_name(*c)).collect();
    }
    let plain = match plain.rsplit_once(':') {
        Some((before, width)) if width.chars().all(|c| c.is_ascii_digit()) => before,
        _ => plain,
    };
    let plain = plain.split('[').next().unwrap_or_default().trim_end();
    let name = plain.rsplit(|c| !is_name(c)).next();
    name.unwrap_or_default().to_owned()
}

/// Removes attributes, which are before the name of an embedded struct as well as after that of a
/// member.
fn without_attributes(declaration: &str) -> String {
    let mut plain = declaration.to_owned();
    while let Some(start) = plain.find("__attribute__") {
        let mut depth = 0;
        let end = plain[start..].find(|c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            c == ')' && depth == 0
        });
        let end = end.map_or(plain.len(), |length| start + length + 1);
        plain.replace_range(start..end, " ");
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "struct outer {\n\
        \tunsigned int               __state;              /*     0     4 */\n\
        \n\
        \t/* XXX 4 bytes hole, try to pack */\n\
        \n\
        \tunion {\n\
        \t\tvoid *             stack;                /*     8     8 */\n\
        \t\t/* typedef u8 -> __u8 */ unsigned char table[2][4]; /*     8     8 */\n\
        \t};                                               /*     8     8 */\n\
        \t/* typedef spinlock_t */ struct spinlock {\n\
        \t\tint (*wake)(struct outer *, int); /*    16     8 */\n\
        \t\tunsigned int low:3;             /*    24: 0  4 */\n\
        \t\tunsigned int high:5;            /*    24: 3  4 */\n\
        \t} __attribute__((__packed__))lock __attribute__((__aligned__(8)));  /*    16    32 */\n\
        \t/* --- cacheline 1 boundary (64 bytes) --- */\n\
        \tstruct {\n\
        \t\tint unreached;             /*    48     4 */\n\
        \t} several[4];  /*    48    16 */\n\
        \tchar flexible[];                /*    64     0 */\n\
        \t/* size: 64, cachelines: 1, members: 5 */\n\
        };\nunion empty {\n};\nstruct twice {\n};\nstruct twice {\n};\n";

    #[test]
    fn members_have_the_names_and_places_that_c_gives_them() {
        let structures = Structures::parse(TEXT);
        assert!(structures.has("empty") && !structures.has("twice"));
        assert_eq!((structures.len(), structures.namesakes().len()), (2, 1));
        assert_eq!(structures.sizes().collect::<Vec<_>>(), [("outer", 64)]);
        let told: Vec<_> = structures
            .paths()
            .map(|(path, m)| (path, m.bit_offset, m.size, m.bitfield))
            .collect();
        let expected = [
            ("outer.__state", 0, 4, false),
            ("outer.stack", 64, 8, false),
            ("outer.table", 64, 8, false),
            ("outer.lock.wake", 128, 8, false),
            ("outer.lock.low", 192, 4, true),
            ("outer.lock.high", 195, 4, true),
            ("outer.lock", 128, 32, false),
            ("outer.several", 384, 16, false),
            ("outer.flexible", 512, 0, false),
        ];
        let expected = expected.map(|(path, bit, size, field)| (path.to_owned(), bit, size, field));
        assert_eq!(told, expected);
        assert_eq!(
            structures.find("outer.lock.high").map(|m| m.bit_offset),
            Some(195)
        );
        assert_eq!(structures.find("outer.lock.none"), None);
        assert_eq!(structures.find("outer.__state.x"), None);
    }
}
