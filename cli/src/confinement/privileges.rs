//! The rights of a process or thread by its user, capabilities(7) and limits.

use std::io;

use rustix::process::{
    DumpableBehavior, Gid, Resource, Rlimit, Uid, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

/// The largest number of descriptors of a machine's process: 64 clients of each of its sockets, its
/// disks, and KVM's.
const MOST_DESCRIPTORS: u64 = 2048;
/// The highest capability that any kernel may have: a set has 64 bits.
const CAPABILITIES: u32 = 64;

/// Gives up, for this process and its descendants: gaining privileges by execution, core dumps,
/// being read by other processes of its user, and unlimited descriptors.
///
/// # Errors
/// If the kernel refuses; with the name of the refused request.
pub(super) fn give_up() -> Result<(), (&'static str, io::Error)> {
    let failed = |what| move |error: rustix::io::Errno| (what, io::Error::from(error));
    set_no_new_privs(true).map_err(failed("PR_SET_NO_NEW_PRIVS"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed("PR_SET_DUMPABLE"))?;
    for (resource, most, name) in [
        (Resource::Core, 0, "RLIMIT_CORE"),
        (Resource::Nofile, MOST_DESCRIPTORS, "RLIMIT_NOFILE"),
    ] {
        let now = getrlimit(resource);
        let at_most = |limit: Option<u64>| Some(limit.map_or(most, |limit| limit.min(most)));
        let limit = Rlimit {
            // The soft limit is raised to the hard limit.
            current: at_most(now.maximum),
            maximum: at_most(now.maximum),
        };
        setrlimit(resource, limit).map_err(failed(name))?;
    }
    Ok(())
}

/// Drops all capabilities of this thread, and of programs that it would execute.
///
/// # Errors
/// If the kernel refuses.
pub(super) fn drop_capabilities() -> io::Result<()> {
    // A thread that may not change the bounding set has no capability to lose by it.
    for number in 0..CAPABILITIES {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        let _ = remove_capability_from_bounding_set(capability);
    }
    // A kernel without ambient capabilities (before 4.3) has none to clear.
    let _ = clear_ambient_capability_set();
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, none)?)
}

/// Changes to another user, with one group and no other. This process has no other thread yet.
///
/// # Errors
/// If this process may not.
pub fn become_user(user: u32, group: u32) -> io::Result<()> {
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    set_thread_groups(&[])?;
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)?;
    Ok(())
}
