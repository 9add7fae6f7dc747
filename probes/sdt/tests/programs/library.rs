//! A library with probes. The program that uses it compiles the generic and the inlined site
//! itself.

use exotrace_sdt::*;

sdt_provider!(library);
sdt_probe_define1!(library, , , generic, "T");

pub fn generic<T: Value>(value: T) {
    sdt_probe1!(library, , , generic, value);
}

pub mod deep {
    exotrace_sdt::sdt_probe_define1!(library, , , inlined, "int");

    #[inline]
    pub fn inlined(value: i32) {
        exotrace_sdt::sdt_probe1!(library, , , inlined, value);
    }
}
