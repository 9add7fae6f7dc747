//! Each wall is tested on a thread that ends, with the host's features.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::sync::Arc;
use std::thread;

use super::*;

/// Returns a run's confinement, without the part for the whole process.
fn confinement() -> Confinement {
    let filters = Kind::ALL.iter().map(|kind| filter::of(*kind, false));
    Confinement(Some(Arc::new(Inner {
        walls: Walls::of_host(),
        filters: filters.collect::<Result<_, _>>().unwrap(),
    })))
}

/// Runs `work` on a thread of its own.
fn on_thread<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    thread::scope(|scope| scope.spawn(work).join().unwrap())
}

#[test]
fn a_service_reaches_its_folder_and_nothing_else() {
    let place = tempfile::tempdir().unwrap();
    let (own, other) = (place.path().join("own"), place.path().join("other"));
    fs::create_dir(&own).unwrap();
    fs::create_dir(&other).unwrap();
    fs::write(other.join("file"), "not for it").unwrap();
    let confinement = confinement();
    let Confinement(Some(inner)) = &confinement else {
        panic!("none")
    };
    on_thread(|| {
        let reach = Reach {
            own: Some(own.clone()),
            read: vec!["/proc".into()],
            removed: None,
            snapshots: None,
        };
        confinement.enter_within(Kind::Service, &reach).unwrap();
        let mut status = String::new();
        let mut file = File::open("/proc/thread-self/status").unwrap();
        file.read_to_string(&mut status).unwrap();
        let has = |line: &str| assert!(status.contains(line), "{line}: {status}");
        has("CapEff:\t0000000000000000\n");
        has("CapBnd:\t0000000000000000\n");
        has("NoNewPrivs:\t1\n");
        drop(UnixListener::bind(own.join("socket")).unwrap());
        fs::remove_file(own.join("socket")).unwrap();
        // Threads can be made, processes cannot.
        assert_eq!(thread::spawn(|| 7).join().unwrap(), 7);
        if inner.walls.seccomp {
            has("Seccomp:\t2\n");
            let refused = Command::new("/bin/true").status().unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ENOSYS), "{refused}");
            let refused = TcpListener::bind("127.0.0.1:0").unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ENOSYS), "{refused}");
        }
        if inner.walls.landlock {
            for path in [other.join("file"), "/etc/passwd".into()] {
                let refused = File::open(&path).unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{path:?}");
            }
            let refused = fs::write(other.join("new"), "").unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        }
        // At the end of a run.
        fs::remove_dir(&own).unwrap();
    });
}

#[test]
fn a_writer_writes_what_is_open_and_opens_nothing() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("console");
    let confinement = confinement();
    let Confinement(Some(inner)) = &confinement else {
        panic!("none")
    };
    let mut writer = confinement.of_writer(File::create(&path).unwrap());
    on_thread(|| {
        writer.write_all(b"guest").unwrap();
        if inner.walls.seccomp || inner.walls.landlock {
            File::open(&path).unwrap_err();
        }
        if inner.walls.seccomp {
            let refused = File::open(&path).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ENOSYS), "{refused}");
        }
    });
    assert_eq!(fs::read(&path).unwrap(), b"guest");
}
