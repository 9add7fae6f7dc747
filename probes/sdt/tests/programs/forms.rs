//! Each form of definition and site. A function has the arguments that its probe passes, in their
//! registers.

use exotrace_sdt::*;

sdt_provider!(forms);

sdt_probe_define0!(forms, , , zero);
sdt_probe_define1!(forms, , unreach, pkt__receive, "struct icmp *");
sdt_probe_define2!(forms, module, , _two__, "int", "long");
sdt_probe_define3!(forms, module, function, three___new, "a", "b", "c");
sdt_probe_define4!(forms, , , four____new, "a", "b", "c", "d");
sdt_probe_define5!(forms, , , five, "a", "b", "c", "d", "e");
sdt_probe_define6!(forms, , , six, "a", "b", "c", "d", "e", "f");
sdt_probe_define7!(forms, , , seven, "a", "b", "c", "d", "e", "f", "g");
sdt_probe_define0_xlate!(forms, , , xzero);
sdt_probe_define1_xlate!(forms, , , xone, "struct icmp *", "struct icmp_hdr_dt *");
sdt_probe_define2_xlate!(forms, , , xtwo, "a", "A", "b", "");
sdt_probe_define3_xlate!(forms, , , xthree, "a", "A", "b", "B", "c", "C");
sdt_probe_define4_xlate!(forms, , , xfour, "a", "A", "b", "B", "c", "C", "d", "D");
sdt_probe_define5_xlate!(forms, , , xfive, "a", "A", "b", "B", "c", "C", "d", "D", "e", "E");
sdt_probe_define6_xlate!(forms, , , xsix, "a", "A", "b", "B", "c", "C", "d", "D", "e", "E", "f", "F");
sdt_probe_define7_xlate!(forms, , , xseven, "a", "A", "b", "B", "c", "C", "d", "D", "e", "E", "f", "F", "g", "G");

macro_rules! functions {
    ($($function:ident($($argument:ident: $type:ty),*) $site:stmt;)*) => {$(
        #[unsafe(no_mangle)]
        #[inline(never)]
        fn $function($($argument: $type),*) { $site }
    )*};
}

functions! {
    zero() sdt_probe0!(forms, , , zero);
    one(a: &u64) sdt_probe1!(forms, , unreach, pkt__receive, a);
    two(a: i32, b: i64) sdt_probe2!(forms, module, , _two__, a, b);
    three(a: u32, b: usize, c: *mut u8) sdt_probe3!(forms, module, function, three___new, a, b, c);
    four(a: i16, b: u16, c: i8, d: u8) sdt_probe4!(forms, , , four____new, a, b, c, d);
    five(a: bool, b: char, c: isize, d: u64, e: Option<&u32>) sdt_probe5!(forms, , , five, a, b, c, d, e);
    six(a: i32, b: i32, c: i32, d: i32, e: i32, f: i32) sdt_probe6!(forms, , , six, a, b, c, d, e, f);
    seven(a: *const u8, b: i32, c: u64, d: i64, e: u32, f: usize) sdt_probe7!(forms, , , seven, a, b, c, d, e, f, 5u8);
}

/// Has two sites once compiled, of the width of each type.
#[inline(never)]
fn generic<T: Value>(a: T) {
    sdt_probe1!(forms, , , generic, a);
}

/// A function that is compiled with its probe and without.
#[unsafe(no_mangle)]
#[inline(never)]
fn costs(a: &i64, b: i32, c: u64) -> i64 {
    #[cfg(not(without))]
    sdt_probe3!(forms, , , costs, a, b, c);
    *a + i64::from(b) + c as i64
}

fn main() {
    zero();
    one(&1);
    two(-2, 2);
    three(3, 3, std::ptr::null_mut());
    four(-4, 4, -4, 4);
    five(true, 'x', -5, 5, None);
    six(1, 2, 3, 4, 5, 6);
    seven(std::ptr::null(), -2, 3, -4, 5, 6);
    generic(-1i16);
    generic(1u64);
    assert_eq!(costs(&1, 1, 1), 3);
}
