//! Definitions: the macros `sdt_provider!`, `sdt_probe_define0!` to `sdt_probe_define7!` and their
//! `_xlate` forms.

/// Checks a provider's name: `sdt_provider!(icmp);`. A name of more than 63 bytes does not compile.
/// It emits nothing.
#[macro_export]
macro_rules! sdt_provider {
    ($provider:ident) => {
        const _: () = assert!(
            stringify!($provider).len() < 64,
            "a provider's name has at most 63 bytes"
        );
    };
}

/// Emits a definition: names, then for each argument its type and its translated type, empty if
/// none.
#[doc(hidden)]
#[macro_export]
macro_rules! __exotrace_sdt_define {
    ($provider:ident, [$($module:ident)?], [$($function:ident)?], $name:ident, $(($type:literal $translated:literal))*) => {
        const _: () = {
            $crate::sdt_provider!($provider);
            assert!(stringify!($($module)?).len() < 64, "a probe's module has at most 63 bytes");
            assert!(stringify!($($function)?).len() < 192, "a probe's function has at most 191 bytes");
            assert!(stringify!($name).len() < 64, "a probe's name has at most 63 bytes");
            $(assert!($type.len() < 128 && $translated.len() < 128, "an argument's type has at most 127 bytes");)*
        };
        // From a library, a linker takes only the needed objects. A `used` static counts as needed,
        // and pulls in the note of its module.
        const _: () = {
            #[used]
            static DEFINED: () = ();
        };
        ::core::arch::global_asm!(
            $crate::__exotrace_sdt_note!(
                ".note.exotrace", "", "exotrace", "1",
                $crate::__exotrace_sdt_string!(stringify!($provider)),
                $crate::__exotrace_sdt_string!(stringify!($($module)?)),
                $crate::__exotrace_sdt_string!(stringify!($($function)?)),
                $crate::__exotrace_sdt_dashed!(stringify!($name))
                $(, $crate::__exotrace_sdt_string!($type), $crate::__exotrace_sdt_string!($translated))*
            ),
            options(att_syntax, raw)
        );
    };
}

/// Defines a probe with no arguments, or with arguments of unknown types:
/// `sdt_probe_define0!(provider, module, function, name);`
#[macro_export]
macro_rules! sdt_probe_define0 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, );
    };
}

/// Defines a probe with no arguments, as [`sdt_probe_define0!`] does.
#[macro_export]
macro_rules! sdt_probe_define0_xlate {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, );
    };
}

/// Defines a probe with one argument of the types given as C writes them: `"struct icmp *"`.
#[macro_export]
macro_rules! sdt_probe_define1 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 ""));
    };
}

/// Defines a probe with one argument, each a type and the type it is translated to (empty if none).
#[macro_export]
macro_rules! sdt_probe_define1_xlate {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $x0:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 $x0));
    };
}

/// Defines a probe with two arguments of the types given as C writes them: `"struct icmp *"`.
#[macro_export]
macro_rules! sdt_probe_define2 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $t1:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 "") ($t1 ""));
    };
}

/// Defines a probe with two arguments, each a type and the type it is translated to (empty if
/// none).
#[macro_export]
macro_rules! sdt_probe_define2_xlate {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $x0:literal, $t1:literal, $x1:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 $x0) ($t1 $x1));
    };
}

/// Defines a probe with three arguments of the types given as C writes them: `"struct icmp *"`.
#[macro_export]
macro_rules! sdt_probe_define3 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $t1:literal, $t2:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 "") ($t1 "") ($t2 ""));
    };
}

/// Defines a probe with three arguments, each a type and the type it is translated to (empty if
/// none).
#[macro_export]
macro_rules! sdt_probe_define3_xlate {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $x0:literal, $t1:literal, $x1:literal, $t2:literal, $x2:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 $x0) ($t1 $x1) ($t2 $x2));
    };
}

/// Defines a probe with four arguments of the types given as C writes them: `"struct icmp *"`.
#[macro_export]
macro_rules! sdt_probe_define4 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $t1:literal, $t2:literal, $t3:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 "") ($t1 "") ($t2 "") ($t3 ""));
    };
}

/// Defines a probe with four arguments, each a type and the type it is translated to (empty if
/// none).
#[macro_export]
macro_rules! sdt_probe_define4_xlate {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $x0:literal, $t1:literal, $x1:literal, $t2:literal, $x2:literal, $t3:literal, $x3:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 $x0) ($t1 $x1) ($t2 $x2) ($t3 $x3));
    };
}

/// Defines a probe with five arguments of the types given as C writes them: `"struct icmp *"`.
#[macro_export]
macro_rules! sdt_probe_define5 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $t1:literal, $t2:literal, $t3:literal, $t4:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 "") ($t1 "") ($t2 "") ($t3 "") ($t4 ""));
    };
}

/// Defines a probe with five arguments, each a type and the type it is translated to (empty if
/// none).
#[macro_export]
macro_rules! sdt_probe_define5_xlate {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $x0:literal, $t1:literal, $x1:literal, $t2:literal, $x2:literal, $t3:literal, $x3:literal, $t4:literal, $x4:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 $x0) ($t1 $x1) ($t2 $x2) ($t3 $x3) ($t4 $x4));
    };
}

/// Defines a probe with six arguments of the types given as C writes them: `"struct icmp *"`.
#[macro_export]
macro_rules! sdt_probe_define6 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $t1:literal, $t2:literal, $t3:literal, $t4:literal, $t5:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 "") ($t1 "") ($t2 "") ($t3 "") ($t4 "") ($t5 ""));
    };
}

/// Defines a probe with six arguments, each a type and the type it is translated to (empty if
/// none).
#[macro_export]
macro_rules! sdt_probe_define6_xlate {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $x0:literal, $t1:literal, $x1:literal, $t2:literal, $x2:literal, $t3:literal, $x3:literal, $t4:literal, $x4:literal, $t5:literal, $x5:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 $x0) ($t1 $x1) ($t2 $x2) ($t3 $x3) ($t4 $x4) ($t5 $x5));
    };
}

/// Defines a probe with seven arguments of the types given as C writes them: `"struct icmp *"`.
#[macro_export]
macro_rules! sdt_probe_define7 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $t1:literal, $t2:literal, $t3:literal, $t4:literal, $t5:literal, $t6:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 "") ($t1 "") ($t2 "") ($t3 "") ($t4 "") ($t5 "") ($t6 ""));
    };
}

/// Defines a probe with seven arguments, each a type and the type it is translated to (empty if
/// none).
#[macro_export]
macro_rules! sdt_probe_define7_xlate {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $t0:literal, $x0:literal, $t1:literal, $x1:literal, $t2:literal, $x2:literal, $t3:literal, $x3:literal, $t4:literal, $x4:literal, $t5:literal, $x5:literal, $t6:literal, $x6:literal $(,)?) => {
        $crate::__exotrace_sdt_define!($provider, [$($module)?], [$($function)?], $name, ($t0 $x0) ($t1 $x1) ($t2 $x2) ($t3 $x3) ($t4 $x4) ($t5 $x5) ($t6 $x6));
    };
}
