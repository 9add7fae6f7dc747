//! Demangles function names for display.

use std::borrow::Cow;
use std::fmt::{self, Write};

use cpp_demangle::{BorrowedSymbol, DemangleOptions, ParseOptions};

/// The maximum length of a mangled name that is parsed, in bytes.
const MAX_MANGLED: usize = 8 << 10;
/// The maximum length of a shown name, in bytes. A short mangled name may expand to any length.
const MAX_SHOWN: usize = 16 << 10;
/// The maximum nesting of a C++ name, counted in rules of its grammar. The names of LLVM and of the
/// C++ library need at most 56.
const MAX_NESTING: u32 = 56;
/// The maximum nesting of a name that may contain an expression. The parser reads some expressions
/// twice, so its time doubles with every other level.
const MAX_NESTING_OF_EXPRESSIONS: u32 = 24;

/// Demangles a Rust or C++ name, without the hash of Rust and with the parameters of C++. Any other
/// name, and one that is too long in either form, is returned unchanged.
#[must_use]
pub fn demangle(name: &str) -> Cow<'_, str> {
    if name.len() > MAX_MANGLED {
        return Cow::Borrowed(name);
    }
    rust(name)
        .or_else(|| cpp(name))
        .map_or(Cow::Borrowed(name), Cow::Owned)
}

fn rust(name: &str) -> Option<String> {
    if !["_R", "_ZN"].iter().any(|prefix| name.starts_with(prefix)) {
        return None;
    }
    let demangled = rustc_demangle::try_demangle(name).ok()?;
    let mut shown = Bounded::default();
    // The alternate form omits the hash.
    write!(shown, "{demangled:#}").ok()?;
    Some(shown.0)
}

fn cpp(name: &str) -> Option<String> {
    // The parser also accepts the codes of bare types, so every function called `i` would be an
    // `int`.
    if !name.starts_with("_Z") {
        return None;
    }
    let nesting = match may_have_expression(name) {
        true => MAX_NESTING_OF_EXPRESSIONS,
        false => MAX_NESTING,
    };
    let parsing = ParseOptions::default().recursion_limit(nesting);
    let symbol = BorrowedSymbol::new_with_options(name.as_bytes(), &parsing).ok()?;
    let options = DemangleOptions::new().no_return_type();
    let mut shown = Bounded::default();
    symbol.structured_demangle(&mut shown, &options).ok()?;
    Some(shown.0)
}

/// Returns a demangled name without the parameters of C++ and what follows them. A name without
/// parameters is returned unchanged.
#[must_use]
pub fn without_parameters(shown: &str) -> &str {
    let end = shown.rfind(')');
    let tail = end.and_then(|end| shown.get(end + 1..)).unwrap_or_default();
    // A Rust name may have parentheses in a part that others follow.
    let (Some(end), false) = (end, tail.contains([':', '>', '<'])) else {
        return shown;
    };
    let mut open = 0usize;
    let bytes = shown.as_bytes().iter().enumerate().take(end + 1).rev();
    for (at, byte) in bytes {
        match byte {
            b')' => open += 1,
            b'(' if open == 1 => return shown.get(..at).unwrap_or(shown),
            b'(' => open = open.saturating_sub(1),
            _ => {}
        }
    }
    shown
}

/// Checks whether the name has the letters that the Itanium C++ ABI puts before an expression or a
/// conversion to a template's parameter. They may be inside of an identifier, because only the
/// parser knows where one ends.
fn may_have_expression(name: &str) -> bool {
    name.as_bytes().windows(2).any(|pair| match pair {
        [b'X', _] | [b'c', b'v'] => true,
        [b'D', kind] => b"BOTUtv".contains(kind),
        [b'A', size] => !size.is_ascii_digit(),
        _ => false,
    })
}

/// A text that rejects growth past [`MAX_SHOWN`].
#[derive(Default)]
struct Bounded(String);

impl fmt::Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len().saturating_add(text.len()) > MAX_SHOWN {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shown_as_their_languages_write_them() {
        for (mangled, shown) in [
            ("main", "main"),
            ("i", "i"),
            ("_start", "_start"),
            (
                "_ZN4core3fmt9Formatter9write_str17h0123456789abcdefE",
                "core::fmt::Formatter::write_str",
            ),
            (
                "_ZN3std2io5Write9write_all17h0123456789abcdefE.llvm.1234",
                "std::io::Write::write_all",
            ),
            (
                "_ZN60_$LT$alloc..string..String$u20$as$u20$core..fmt..Display$GT$3fmt17h0123456789abcdefE",
                "<alloc::string::String as core::fmt::Display>::fmt",
            ),
            ("_RNvCs1234_7mycrate3foo", "mycrate::foo"),
            ("_ZN5space3fooEii", "space::foo(int, int)"),
            ("_Z3maxIiET_S0_S0_", "max<int>(int, int)"),
            (
                "_ZNSt6vectorIiSaIiEE9push_backERKi",
                "std::vector<int, std::allocator<int> >::push_back(int const&)",
            ),
            ("_ZN3FooC1Ev", "Foo::Foo()"),
            ("_Z4workv.part.0", "work() [clone .part.0]"),
            ("_Znot_mangled", "_Znot_mangled"),
            ("_ZN", "_ZN"),
            ("_R", "_R"),
            ("", ""),
        ] {
            assert_eq!(demangle(mangled), shown, "{mangled}");
        }
    }

    #[test]
    fn parameters_are_cut_off() {
        for (shown, cut) in [
            ("space::foo(int, int)", "space::foo"),
            ("Foo::get() const", "Foo::get"),
            ("work() [clone .part.0]", "work"),
            ("call(void (*)(int))", "call"),
            ("A::operator()(int)", "A::operator()"),
            ("max<int>(int, int)", "max<int>"),
            (
                "(anonymous namespace)::go(int)",
                "(anonymous namespace)::go",
            ),
            ("<(A, B) as T>::call", "<(A, B) as T>::call"),
            ("main", "main"),
            ("a)", "a)"),
            ("", ""),
        ] {
            assert_eq!(without_parameters(shown), cut, "{shown}");
        }
    }

    /// At its own depth limit, the parser would need days for the first.
    #[test]
    fn names_whose_parsing_doubles_with_each_step_are_shown_as_they_are() {
        for (start, step, steps, end) in [
            ("_ZclA_DO", "nw", 40, "TcTsh0_iSaqu"),
            ("_ZcvN", "T0_I", 22, "_Y"),
            ("_ZptDT", "nwqu", 22, "aSSaXUl"),
        ] {
            for steps in 1..=steps {
                let name = format!("{start}{}{end}", step.repeat(steps));
                assert_eq!(demangle(&name), name);
            }
        }
    }

    #[test]
    fn names_that_would_fill_the_memory_are_shown_as_they_are() {
        let long = format!("_ZN{}E", "1a".repeat(MAX_MANGLED));
        assert_eq!(demangle(&long), long);
        // Each parameter is a pair of the previous one: 2^24 times `int` in the end.
        let mut doubling = "_Z1fSt4pairIiiE".to_owned();
        doubling.push_str("S_IS0_S0_E");
        for back in 1..24u32 {
            let seq = match back - 1 {
                n if n < 36 => char::from_digit(n + 1, 36)
                    .unwrap_or('0')
                    .to_ascii_uppercase(),
                _ => 'Z',
            };
            doubling.push_str(&format!("S_IS{seq}_S{seq}_E"));
        }
        assert_eq!(demangle(&doubling), doubling);
    }
}
