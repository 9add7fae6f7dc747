//! `icmp [COUNT]`: a program with probes. It makes COUNT (10) ICMP headers of type 3, Destination
//! Unreachable, with codes 0 to 15 in turn, and passes each to two probes:
//!
//! - `icmp::unreach:pkt-receive` with `struct icmp *`, and the number of earlier headers
//! - `icmp:::receive` with `struct icmp *`, which scripts see as `struct icmp_hdr_dt *`
//!
//! It prints `icmp: COUNT packets`.

use exotrace_sdt::{
    sdt_probe_define1_xlate, sdt_probe_define2, sdt_probe1, sdt_probe2, sdt_provider,
};

/// RFC 792, with the field names of BSD; in network byte order.
#[allow(
    non_camel_case_types,
    dead_code,
    reason = "a tracer reads it, by the names that C has"
)]
#[repr(C)]
struct icmp {
    icmp_type: u8,
    icmp_code: u8,
    icmp_cksum: u16,
    icmp_id: u16,
    icmp_seq: u16,
}

sdt_provider!(icmp);
sdt_probe_define2!(icmp, , unreach, pkt__receive, "struct icmp *", "unsigned long");
sdt_probe_define1_xlate!(icmp, , , receive, "struct icmp *", "struct icmp_hdr_dt *");

#[inline(never)]
fn unreach(packet: &icmp, before: u64) {
    sdt_probe2!(icmp, , unreach, pkt__receive, packet, before);
}

#[inline(never)]
fn receive(packet: &icmp) {
    sdt_probe1!(icmp, , , receive, packet);
}

fn main() {
    let count = std::env::args()
        .nth(1)
        .and_then(|count| count.parse().ok())
        .unwrap_or(10);
    for i in 0..count {
        let packet = icmp {
            icmp_type: 3,
            icmp_code: (i % 16) as u8,
            icmp_cksum: 0,
            icmp_id: 7_u16.to_be(),
            icmp_seq: (i as u16).to_be(),
        };
        receive(&packet);
        unreach(&packet, i);
    }
    println!("icmp: {count} packets");
}
