//! Tests of names in use, remains of dead machines, and unsafe run directories.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

fn registry() -> (tempfile::TempDir, Registry) {
    let folder = tempfile::tempdir().unwrap();
    let registry = Registry::at(folder.path().join("exotrace")).unwrap();
    (folder, registry)
}

fn name(text: &str) -> VmName {
    text.parse().unwrap()
}

#[test]
fn a_name_is_taken_while_its_owner_lives_and_free_afterwards() {
    let (folder, registry) = registry();
    let (entry, left_behind) = registry.claim(Some(name("web"))).unwrap();
    assert_eq!(left_behind, None);
    assert_eq!(entry.control(), folder.path().join("exotrace/web/control"));
    let mode = fs::metadata(folder.path().join("exotrace/web"))
        .unwrap()
        .mode();
    assert_eq!(mode & 0o777, 0o700);

    let error = registry.claim(Some(name("web"))).unwrap_err().to_string();
    let own = std::process::id();
    assert!(
        error.contains("named web runs already") && error.contains(&own.to_string()),
        "{error}"
    );
    let (running, removed) = registry.list().unwrap();
    assert_eq!((running.len(), removed.len()), (1, 0));
    assert_eq!(
        (&running[0].name, &running[0].pid),
        (&name("web"), &own.to_string())
    );

    drop(entry);
    assert_eq!(
        fs::read_dir(folder.path().join("exotrace"))
            .unwrap()
            .count(),
        0
    );
    registry.claim(Some(name("web"))).unwrap();
}

#[test]
fn default_names_count_up_and_the_first_free_one_is_taken() {
    let (_folder, registry) = registry();
    let (one, _) = registry.claim(None).unwrap();
    let (two, _) = registry.claim(None).unwrap();
    assert_eq!((one.name(), two.name()), (&name("vm1"), &name("vm2")));
    drop(one);
    assert_eq!(registry.claim(None).unwrap().0.name(), &name("vm1"));
}

#[test]
fn what_a_dead_machine_left_behind_is_removed_and_told() {
    let (folder, registry) = registry();
    let dead = folder.path().join("exotrace/dead");
    for by_list in [true, false] {
        DirBuilder::new().mode(0o700).create(&dead).unwrap();
        fs::write(dead.join("lock"), "4242\n").unwrap();
        for socket in SOCKETS {
            drop(std::os::unix::net::UnixListener::bind(dead.join(socket)).unwrap());
        }
        if by_list {
            let (running, removed) = registry.list().unwrap();
            assert_eq!((running, removed), (vec![], vec![name("dead")]));
            assert!(!dead.exists());
        } else {
            let (entry, left_behind) = registry.claim(Some(name("dead"))).unwrap();
            assert_eq!(left_behind.as_deref(), Some("4242"));
            for socket in SOCKETS {
                let old = entry.folder().join(socket);
                assert!(!old.exists(), "{socket}: the old socket is gone");
            }
        }
    }
}

#[test]
fn without_a_name_the_only_machine_is_meant() {
    let (_folder, registry) = registry();
    assert!(
        find(&registry, None)
            .unwrap_err()
            .to_string()
            .contains("no machine runs")
    );
    let one = registry.claim(Some(name("one"))).unwrap();
    assert_eq!(find(&registry, None).unwrap().name, name("one"));
    let error = find(&registry, Some(name("other")))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("no machine named other runs; these do: one"),
        "{error}"
    );
    let _two = registry.claim(Some(name("two"))).unwrap();
    let error = find(&registry, None).unwrap_err().to_string();
    assert!(
        error.contains("one, two") && error.contains("--vm"),
        "{error}"
    );
    assert_eq!(
        find(&registry, Some(name("two"))).unwrap().name,
        name("two")
    );
    drop(one);
}

#[test]
fn a_run_directory_that_others_can_change_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let open = folder.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let link = folder.path().join("link");
    let private = folder.path().join("private");
    DirBuilder::new().mode(0o700).create(&private).unwrap();
    symlink(&private, &link).unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    for (path, expected) in [
        (open, "has mode 0777"),
        (link, "symbolic link"),
        (file, "not a directory"),
    ] {
        let error = Registry::at(path).unwrap_err().to_string();
        assert!(
            error.contains(expected) && error.contains("0700"),
            "{error}"
        );
    }
    let registry = Registry::at(private).unwrap();
    symlink("/tmp", folder.path().join("private/vm")).unwrap();
    let error = registry.claim(Some(name("vm"))).unwrap_err().to_string();
    assert!(error.contains("symbolic link"), "{error}");
}

fn find(registry: &Registry, name: Option<VmName>) -> Result<Running, RegistryError> {
    choose(registry.list().unwrap().0, name)
}

#[test]
fn a_machine_is_waited_for_until_its_owner_is_gone() {
    let (_folder, registry) = registry();
    let (entry, _) = registry.claim(Some(name("web"))).unwrap();
    let running = registry.list().unwrap().0.remove(0);
    assert!(!running.wait_gone(Duration::from_millis(20)));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| running.wait_gone(Duration::from_secs(60)));
        drop(entry);
        assert!(waiting.join().unwrap());
    });
    assert!(registry.list().unwrap().0.is_empty());
    // A later machine of the same name is another process.
    let _entry = registry.claim(Some(name("web"))).unwrap();
    let other = Running {
        pid: "1".to_owned(),
        ..running
    };
    assert!(other.wait_gone(Duration::from_secs(60)));
}
