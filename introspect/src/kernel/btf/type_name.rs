//! Types as C writes them.

use std::borrow::Cow;

use super::{Btf, Kind, TypeId};

/// The maximum depth of types; deeper ones are written as `...`.
const MAX_DEPTH: usize = 12;
/// The maximum number of types in one name, including those of all parameters.
const MAX_TYPES: usize = 128;
/// Size in bytes after which nothing is appended to a name.
const MAX_LENGTH: usize = 512;

impl Btf {
    /// Returns the type as C writes it, without an identifier: `const struct file *`, `int (*)(void
    /// *)`, `char [16]`. The length is bounded: the innermost parts of endless types are written as
    /// `...`.
    #[must_use]
    pub fn type_name(&self, id: TypeId) -> String {
        // Most names fit: a list has a hundred thousand of them.
        let mut out = String::with_capacity(32);
        let mut types_left = MAX_TYPES;
        self.write_type(&mut out, id, "", 0, &mut types_left);
        out
    }

    /// Writes `id` around `inner`, the text in the identifier's place: `*`, `(*)`, `[16]`.
    fn write_type(
        &self,
        out: &mut String,
        id: TypeId,
        inner: &str,
        depth: usize,
        types_left: &mut usize,
    ) {
        let space = if inner.is_empty() { "" } else { " " };
        if depth > MAX_DEPTH || out.len() + inner.len() > MAX_LENGTH || *types_left == 0 {
            out.push_str("...");
            return;
        }
        *types_left -= 1;
        let depth = depth + 1;
        let Some(record) = self.record(id) else {
            let name = if id.0 == 0 { "void" } else { "?" };
            return append(out, [name, space, inner]);
        };
        let target = TypeId(record.size_or_type);
        let name = self.name(record.name);
        let keyword = match record.kind {
            Kind::Struct => "struct ",
            Kind::Union => "union ",
            Kind::Enum | Kind::Enum64 => "enum ",
            Kind::Forward if record.flag => "union ",
            Kind::Forward => "struct ",
            _ => "",
        };
        match record.kind {
            Kind::Pointer => {
                let inner = pointer_to(inner);
                self.write_type(out, target, &inner, depth, types_left);
            }
            Kind::Array => {
                let (element, count) = record.array().unwrap_or((TypeId(0), 0));
                self.write_type(
                    out,
                    element,
                    &format!("{}[{count}]", grouped(inner)),
                    depth,
                    types_left,
                );
            }
            // A pointer's qualifier follows the star; any other comes first.
            Kind::Const | Kind::Volatile | Kind::Restrict => {
                let word = match record.kind {
                    Kind::Const => "const",
                    Kind::Volatile => "volatile",
                    _ => "restrict",
                };
                if self.record(target).is_some_and(|r| r.kind == Kind::Pointer) {
                    let after = if inner.is_empty() {
                        String::new()
                    } else {
                        format!(" {inner}")
                    };
                    self.write_type(out, target, &format!("{word}{after}"), depth, types_left);
                } else {
                    append(out, [word, " "]);
                    self.write_type(out, target, inner, depth, types_left);
                }
            }
            Kind::TypeTag => self.write_type(out, target, inner, depth, types_left),
            Kind::Prototype => {
                let mut parameters = String::new();
                for (index, (name, parameter)) in record.parameters().enumerate() {
                    if index > 0 {
                        parameters.push_str(", ");
                    }
                    if parameters.len() > MAX_LENGTH {
                        parameters.push_str("...");
                        break;
                    }
                    match (name, parameter) {
                        (0, TypeId(0)) => parameters.push_str("..."),
                        _ => self.write_type(&mut parameters, parameter, "", depth, types_left),
                    }
                }
                if parameters.is_empty() {
                    parameters.push_str("void");
                }
                self.write_type(
                    out,
                    target,
                    &format!("{}({parameters})", grouped(inner)),
                    depth,
                    types_left,
                );
            }
            _ if name.is_empty() => {
                append(out, [keyword, "{...}", space, inner]);
            }
            _ => append(out, [keyword, name, space, inner]),
        }
    }
}

fn append<const COUNT: usize>(out: &mut String, parts: [&str; COUNT]) {
    parts.into_iter().for_each(|part| out.push_str(part));
}

/// Returns the text in a pointer's place, for the target around it: for nearly all, only stars.
fn pointer_to(inner: &str) -> Cow<'_, str> {
    const STARS: &str = "********";
    match STARS.get(..inner.len() + 1) {
        Some(stars) if stars.starts_with(inner) => Cow::Borrowed(stars),
        _ => Cow::Owned(["*", inner].concat()),
    }
}

/// Adds the parentheses that a pointer to an array or function needs.
fn grouped(inner: &str) -> String {
    match inner.starts_with('*') {
        true => format!("({inner})"),
        false => inner.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::test_types::TestBtf;
    use super::*;

    /// Without a bound, a function that takes itself many times over would be written 100^12 times.
    #[test]
    fn branching_types_stay_short() {
        let mut t = TestBtf::default();
        let parameters: Vec<u32> = std::iter::repeat_n([0, 2], 100).flatten().collect();
        let own = t.add("", Kind::Prototype, 100, 2, &parameters);
        t.add("", Kind::Pointer, 0, own, &[]);
        let btf = Btf::parse(&t.bytes()).unwrap();
        let name = btf.type_name(TypeId(own));
        assert!(
            name.contains("...") && name.len() < 32 * MAX_LENGTH,
            "{} bytes",
            name.len()
        );
    }

    #[test]
    fn types_read_as_in_c() {
        let mut t = TestBtf::default();
        let int = t.add("int", Kind::Int, 0, 4, &[32]);
        let char = t.add("char", Kind::Int, 0, 1, &[8]);
        let file = t.add("file", Kind::Struct, 0, 0, &[]);
        let const_file = t.add("", Kind::Const, 0, file, &[]);
        let pointer = t.add("", Kind::Pointer, 0, const_file, &[]);
        let const_pointer = t.add("", Kind::Const, 0, pointer, &[]);
        let array = t.add("", Kind::Array, 0, 0, &[char, int, 16]);
        let to_array = t.add("", Kind::Pointer, 0, array, &[]);
        let of_pointers = t.add("", Kind::Array, 0, 0, &[pointer, int, 2]);
        let prototype = t.add("", Kind::Prototype, 2, int, &[0, pointer, 0, 0]);
        let function = t.add("", Kind::Pointer, 0, prototype, &[]);
        let none = t.add("", Kind::Prototype, 0, 0, &[]);
        let callback = t.add("", Kind::Pointer, 0, none, &[]);
        let anonymous = t.add("", Kind::Union, 0, 8, &[]);
        let forward = t.add("later", Kind::Forward, 0, 0, &[]);
        let void_pointer = t.add("", Kind::Pointer, 0, 0, &[]);
        let endless = t.next();
        t.add("", Kind::Pointer, 0, endless, &[]);
        let btf = Btf::parse(&t.bytes()).unwrap();
        for (id, expected) in [
            (0, "void"),
            (int, "int"),
            (const_file, "const struct file"),
            (pointer, "const struct file *"),
            (const_pointer, "const struct file *const"),
            (array, "char [16]"),
            (to_array, "char (*)[16]"),
            (of_pointers, "const struct file *[2]"),
            (function, "int (*)(const struct file *, ...)"),
            (callback, "void (*)(void)"),
            (anonymous, "union {...}"),
            (forward, "struct later"),
            (void_pointer, "void *"),
            (endless, "..."),
            (9999, "?"),
        ] {
            assert_eq!(btf.type_name(TypeId(id)), expected);
        }
    }
}
