//! Uses the library: its probe sites are here.

fn main() {
    library::generic(1u8);
    library::generic(2u64);
    library::deep::inlined(3);
}
