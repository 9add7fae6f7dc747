#![allow(clippy::unwrap_used)]
use super::*;
pub(in super::super) const LAYOUT: Layout = Layout {
    pid: 0x10,
    comm: 0x20,
    start: 0x18,
    running: Err(String::new()),
    deadline: Err(String::new()),
    port: None,
};
