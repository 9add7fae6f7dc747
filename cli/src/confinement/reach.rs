//! Landlock: the files that a thread reaches by name. Files already open stay so.
//!
//! TCP and other processes' abstract sockets are out of reach.

use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, RestrictionStatus, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

/// The newest version of Landlock whose restrictions are requested; an older one applies those that
/// it has.
const NEWEST: ABI = ABI::V6;

/// The files that the threads of a run reach, besides the open ones.
#[derive(Debug, Default)]
pub struct Reach {
    /// A folder to make and remove files and sockets in.
    pub own: Option<PathBuf>,
    /// Folders and files to read.
    pub read: Vec<PathBuf>,
    /// A folder to remove files from.
    pub removed: Option<PathBuf>,
    /// A folder to make snapshots in.
    pub snapshots: Option<PathBuf>,
}

impl Reach {
    /// Returns the reach of a run: its folder in the run directory, the time zone files, `--symfs`,
    /// and the folder for its snapshots.
    pub fn of_run(folder: &Path, symfs: Option<&Path>, snapshots: Option<&Path>) -> Self {
        let zones = ["/usr/share/zoneinfo", "/etc/localtime"].map(PathBuf::from);
        Self {
            own: Some(folder.to_path_buf()),
            read: zones.into_iter().chain(symfs.map(Into::into)).collect(),
            removed: None,
            snapshots: snapshots.map(Into::into),
        }
    }
}

/// Confines this thread, and those that it makes from now on, to `reach`. Returns whether the
/// host's kernel has Landlock.
///
/// # Errors
/// If the kernel has it and refuses.
pub(super) fn restrict(reach: &Reach) -> io::Result<bool> {
    let status = restrict_with(reach).map_err(io::Error::other)?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

fn restrict_with(reach: &Reach) -> Result<RestrictionStatus, RulesetError> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::AbstractUnixSocket)?
        .create()?;
    let within = AccessFs::from_read(NEWEST) | AccessFs::from_write(NEWEST);
    if let Some(Ok(folder)) = reach.snapshots.as_ref().map(PathFd::new) {
        rules = rules.add_rule(PathBeneath::new(folder, within & !AccessFs::Execute))?;
    }
    // A missing path needs no rule.
    if let Some(own) = &reach.own {
        if let Ok(folder) = PathFd::new(own) {
            rules = rules.add_rule(PathBeneath::new(folder, within & !AccessFs::Execute))?;
        }
        // The folder itself is removed at the end; others beside it are not empty.
        if let Some(Ok(around)) = own.parent().map(PathFd::new) {
            rules = rules.add_rule(PathBeneath::new(around, AccessFs::RemoveDir))?;
        }
    }
    if let Some(Ok(folder)) = reach.removed.as_ref().map(PathFd::new) {
        rules = rules.add_rule(PathBeneath::new(folder, AccessFs::RemoveFile))?;
    }
    for path in &reach.read {
        let Ok(opened) = PathFd::new(path) else {
            continue;
        };
        let access: BitFlags<AccessFs> = match path.is_dir() {
            true => AccessFs::ReadFile | AccessFs::ReadDir,
            false => AccessFs::ReadFile.into(),
        };
        rules = rules.add_rule(PathBeneath::new(opened, access))?;
    }
    rules.restrict_self()
}
