//! Sites: the macros `sdt_probe0!` to `sdt_probe7!`.

/// Expands to the function behind a site with values. Each value's type knows its width once the
/// function is compiled for it. So exactly one of the statements is left, whose operands are the
/// values' registers.
#[doc(hidden)]
#[macro_export]
macro_rules! __exotrace_sdt_site {
    ($names:tt, $values:literal, $(($size:ident $value:ident $type:ident $expression:expr))*) => {{
        #[inline(always)]
        #[allow(unsafe_code, named_asm_labels, clippy::too_many_arguments)]
        fn site<$($type: $crate::Value),*>($($value: $type),*) {
            $crate::__exotrace_sdt_widths!($names, $values, [], $(($size $value $type))*);
        }
        site($($expression),*);
    }};
}

/// Moves one value after another from the list on the right, with its operand's type, to the list
/// on the left.
#[doc(hidden)]
#[macro_export]
macro_rules! __exotrace_sdt_widths {
    (
        ($provider:ident, [$($module:ident)?], [$($function:ident)?], $name:ident), $values:literal,
        [$(($size:ident $value:ident $type:ident))*],
    ) => {
        // SAFETY: one `nop`, which changes no register, flag or memory; everything else goes to
        // other sections. Values are only read.
        unsafe {
            ::core::arch::asm!(
                $crate::__exotrace_sdt_site_text!(
                    stringify!($provider), stringify!($($module)?), stringify!($($function)?), stringify!($name), $values
                ),
                $($size = const <$type as $crate::Value>::SIZE,)*
                $($value = in(reg) $value,)*
                // Tracers follow pointers: `readonly`, not `nomem`, so that the program's writes
                // are in memory.
                options(att_syntax, readonly, nostack, preserves_flags),
            )
        }
    };
    ($names:tt, $values:literal, [$($done:tt)*], ($size:ident $value:ident $type:ident) $($rest:tt)*) => {
        if <$type as $crate::Value>::IS_WIDE {
            let $value: u64 = $crate::Value::wide($value);
            $crate::__exotrace_sdt_widths!($names, $values, [$($done)* ($size $value $type)], $($rest)*);
        } else {
            let $value: u32 = $crate::Value::narrow($value);
            #[allow(asm_sub_register)]
            $crate::__exotrace_sdt_widths!($names, $values, [$($done)* ($size $value $type)], $($rest)*);
        }
    };
}

/// A site of a probe without values, as a statement: `sdt_probe0!(provider, module, function,
/// name)`. Module and function may be empty.
#[macro_export]
macro_rules! sdt_probe0 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident $(,)?) => {
        $crate::__exotrace_sdt_site!(
            ($provider, [$($module)?], [$($function)?], $name),
            "",

        )
    };
}

/// A site of a probe with one value of types that implement [`Value`](crate::Value), as a
/// statement.
#[macro_export]
macro_rules! sdt_probe1 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $a0:expr $(,)?) => {
        $crate::__exotrace_sdt_site!(
            ($provider, [$($module)?], [$($function)?], $name),
            "{s0}@{v0}",
            (s0 v0 T0 $a0)
        )
    };
}

/// A site of a probe with two values of types that implement [`Value`](crate::Value), as a
/// statement.
#[macro_export]
macro_rules! sdt_probe2 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $a0:expr, $a1:expr $(,)?) => {
        $crate::__exotrace_sdt_site!(
            ($provider, [$($module)?], [$($function)?], $name),
            "{s0}@{v0} {s1}@{v1}",
            (s0 v0 T0 $a0) (s1 v1 T1 $a1)
        )
    };
}

/// A site of a probe with three values of types that implement [`Value`](crate::Value), as a
/// statement.
#[macro_export]
macro_rules! sdt_probe3 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $a0:expr, $a1:expr, $a2:expr $(,)?) => {
        $crate::__exotrace_sdt_site!(
            ($provider, [$($module)?], [$($function)?], $name),
            "{s0}@{v0} {s1}@{v1} {s2}@{v2}",
            (s0 v0 T0 $a0) (s1 v1 T1 $a1) (s2 v2 T2 $a2)
        )
    };
}

/// A site of a probe with four values of types that implement [`Value`](crate::Value), as a
/// statement.
#[macro_export]
macro_rules! sdt_probe4 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $a0:expr, $a1:expr, $a2:expr, $a3:expr $(,)?) => {
        $crate::__exotrace_sdt_site!(
            ($provider, [$($module)?], [$($function)?], $name),
            "{s0}@{v0} {s1}@{v1} {s2}@{v2} {s3}@{v3}",
            (s0 v0 T0 $a0) (s1 v1 T1 $a1) (s2 v2 T2 $a2) (s3 v3 T3 $a3)
        )
    };
}

/// A site of a probe with five values of types that implement [`Value`](crate::Value), as a
/// statement.
#[macro_export]
macro_rules! sdt_probe5 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $a0:expr, $a1:expr, $a2:expr, $a3:expr, $a4:expr $(,)?) => {
        $crate::__exotrace_sdt_site!(
            ($provider, [$($module)?], [$($function)?], $name),
            "{s0}@{v0} {s1}@{v1} {s2}@{v2} {s3}@{v3} {s4}@{v4}",
            (s0 v0 T0 $a0) (s1 v1 T1 $a1) (s2 v2 T2 $a2) (s3 v3 T3 $a3) (s4 v4 T4 $a4)
        )
    };
}

/// A site of a probe with six values of types that implement [`Value`](crate::Value), as a
/// statement.
#[macro_export]
macro_rules! sdt_probe6 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $a0:expr, $a1:expr, $a2:expr, $a3:expr, $a4:expr, $a5:expr $(,)?) => {
        $crate::__exotrace_sdt_site!(
            ($provider, [$($module)?], [$($function)?], $name),
            "{s0}@{v0} {s1}@{v1} {s2}@{v2} {s3}@{v3} {s4}@{v4} {s5}@{v5}",
            (s0 v0 T0 $a0) (s1 v1 T1 $a1) (s2 v2 T2 $a2) (s3 v3 T3 $a3) (s4 v4 T4 $a4) (s5 v5 T5 $a5)
        )
    };
}

/// A site of a probe with seven values of types that implement [`Value`](crate::Value), as a
/// statement.
#[macro_export]
macro_rules! sdt_probe7 {
    ($provider:ident, $($module:ident)?, $($function:ident)?, $name:ident, $a0:expr, $a1:expr, $a2:expr, $a3:expr, $a4:expr, $a5:expr, $a6:expr $(,)?) => {
        $crate::__exotrace_sdt_site!(
            ($provider, [$($module)?], [$($function)?], $name),
            "{s0}@{v0} {s1}@{v1} {s2}@{v2} {s3}@{v3} {s4}@{v4} {s5}@{v5} {s6}@{v6}",
            (s0 v0 T0 $a0) (s1 v1 T1 $a1) (s2 v2 T2 $a2) (s3 v3 T3 $a3) (s4 v4 T4 $a4) (s5 v5 T5 $a5) (s6 v6 T6 $a6)
        )
    };
}
