//! The assembly text of the notes, as macros that expand to string literals. Only the macros of
//! this crate call them.
//!
//! Labels are numbers (each `991f` is the next one), so that one object file may repeat the text: a
//! generic or inlined function leaves a note for each copy of a site.

/// Expands to a note in section `$section`, whose description is `$description`.
#[doc(hidden)]
#[macro_export]
macro_rules! __exotrace_sdt_note {
    ($section:literal, $flags:literal, $owner:literal, $type:literal, $($description:expr),+) => {
        concat!(
            ".pushsection ", $section, ",\"", $flags, "\",@note\n",
            ".balign 4\n",
            ".4byte 992f-991f, 994f-993f, ", $type, "\n",
            "991: .asciz \"", $owner, "\"\n",
            "992: .balign 4\n",
            "993:\n", $($description,)+
            "994: .balign 4\n",
            ".popsection\n",
        )
    };
}

/// Expands to the string `$text` with its NUL.
#[doc(hidden)]
#[macro_export]
macro_rules! __exotrace_sdt_string {
    ($($text:expr),*) => {
        concat!(".asciz \"", $($text,)* "\"\n")
    };
}

/// Expands to the identifier with each `__` as `-`. It goes one character at a time; the symbol
/// says that an underscore waits for its second.
#[doc(hidden)]
#[macro_export]
macro_rules! __exotrace_sdt_dashed {
    ($identifier:expr) => {
        concat!(
            ".set .Lexotrace_sdt_wait, 0\n",
            ".irpc c,",
            $identifier,
            "\n",
            ".ifc \\c,_\n",
            ".if .Lexotrace_sdt_wait\n",
            ".ascii \"-\"\n",
            ".endif\n",
            ".set .Lexotrace_sdt_wait, 1 - .Lexotrace_sdt_wait\n",
            ".else\n",
            ".if .Lexotrace_sdt_wait\n",
            ".ascii \"_\"\n",
            ".set .Lexotrace_sdt_wait, 0\n",
            ".endif\n",
            ".ascii \"\\c\"\n",
            ".endif\n",
            ".endr\n",
            ".if .Lexotrace_sdt_wait\n",
            ".ascii \"_\"\n",
            ".endif\n",
            ".byte 0\n",
        )
    };
}

/// Expands to a site: the instruction, its two notes, and the anchor of link-time addresses, one
/// for a program, with systemtap's names. No loaded section refers to it. Flag `R` keeps it when
/// the linker collects unused sections, as it does for Rust. By flag `?`, the notes go with their
/// function if the linker drops duplicates of it.
#[doc(hidden)]
#[macro_export]
macro_rules! __exotrace_sdt_site_text {
    ($provider:expr, $module:expr, $function:expr, $name:expr, $values:expr) => {
        concat!(
            "990: nop\n",
            $crate::__exotrace_sdt_note!(
                ".note.stapsdt",
                "?",
                "stapsdt",
                "3",
                ".8byte 990b, _.stapsdt.base, 0\n",
                $crate::__exotrace_sdt_string!($provider),
                $crate::__exotrace_sdt_string!($name),
                $crate::__exotrace_sdt_string!($values)
            ),
            $crate::__exotrace_sdt_note!(
                ".note.exotrace",
                "?",
                "exotrace",
                "2",
                ".8byte 990b, _.stapsdt.base\n",
                $crate::__exotrace_sdt_string!($provider),
                $crate::__exotrace_sdt_string!($module),
                $crate::__exotrace_sdt_string!($function),
                $crate::__exotrace_sdt_dashed!($name)
            ),
            ".ifndef _.stapsdt.base\n",
            ".pushsection .stapsdt.base,\"aGR\",\"progbits\",.stapsdt.base,comdat\n",
            ".weak _.stapsdt.base\n",
            ".hidden _.stapsdt.base\n",
            "_.stapsdt.base: .space 1\n",
            ".size _.stapsdt.base, 1\n",
            ".popsection\n",
            ".endif\n",
        )
    };
}
