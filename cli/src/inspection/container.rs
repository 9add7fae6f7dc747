//! The short name of the container that a process is in.
//!
//! A process is in a container if it is in a pid namespace other than the initial one. The guest
//! knows no containers beyond that. Their names are in the control groups that Docker, Podman,
//! systemd-nspawn and others make, each by its own convention.

/// The length of a container's identity in hexadecimal digits, and the length that people see.
const IDENTITY: usize = 64;
const SHOWN: usize = 12;

/// Returns the name of a container, by the first of these that there is: the innermost control
/// group that a container's manager made, the own host name, the number of the pid namespace.
pub(super) fn container_name(
    cgroup: Option<&str>,
    host: Option<String>,
    namespace: Option<u32>,
) -> String {
    let host = || host.filter(|name| !name.is_empty());
    let by_group = cgroup.and_then(by_group);
    by_group.or_else(host).unwrap_or_else(|| match namespace {
        Some(number) => format!("pid:[{number}]"),
        None => "pid".to_owned(),
    })
}

/// Returns the name by the innermost group that a container's manager made.
fn by_group(path: &str) -> Option<String> {
    let mut elements = path.rsplit('/').peekable();
    while let Some(element) = elements.next() {
        let above = elements.peek().copied().unwrap_or_default();
        if let Some(name) = by_element(element, above) {
            return Some(name);
        }
    }
    None
}

/// Returns the name of the container whose group is `element`, below the group `above`.
fn by_element(element: &str, above: &str) -> Option<String> {
    let unit = element
        .strip_suffix(".scope")
        .or_else(|| element.strip_suffix(".service"))
        .unwrap_or(element);
    if let Some(name) = by_identity(unit, above) {
        return Some(name);
    }
    // Of systemd-nspawn and machined, LXC, and Flatpak's program with the pid of its launcher.
    let is_unit = unit.len() < element.len();
    let name = match unit.strip_prefix("app-flatpak-") {
        Some(program) => program.rsplit_once('-').map(|(program, _)| program),
        None if is_unit => ["systemd-nspawn@", "machine-"]
            .iter()
            .find_map(|prefix| unit.strip_prefix(prefix)),
        None => element.strip_prefix("lxc.payload."),
    };
    name.filter(|name| !name.is_empty()).map(unescaped)
}

/// Returns the shortened name of a group that ends in a container's identity: `docker-ID`,
/// `cri-containerd-ID`, `SLICE:docker:ID`, or `ID` alone.
fn by_identity(unit: &str, above: &str) -> Option<String> {
    let start = unit.len().checked_sub(IDENTITY)?;
    let (manager, identity) = unit.split_at_checked(start)?;
    if !identity.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let shown = identity.get(..SHOWN)?;
    let manager = match manager.strip_suffix(['-', ':']) {
        Some(manager) => manager.rsplit(':').next().unwrap_or(manager),
        None if !manager.is_empty() => return None,
        None if above == "docker" => above,
        None => return Some(shown.to_owned()),
    };
    Some(format!("{manager}-{shown}"))
}

/// Returns a part of a unit's name without systemd's escapes (`\x2d`).
fn unescaped(name: &str) -> String {
    let mut bytes = Vec::with_capacity(name.len());
    let mut parts = name.split("\\x");
    bytes.extend(parts.next().unwrap_or_default().bytes());
    for part in parts {
        let digits = part.get(..2);
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend(part.bytes().skip(2));
            }
            None => {
                bytes.extend(b"\\x");
                bytes.extend(part.bytes());
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_have_the_names_that_their_managers_show() {
        let id = "0123456789abcdef".repeat(4);
        for (path, expected) in [
            ("/system.slice/docker-ID.scope", "docker-0123456789ab"),
            ("/docker/ID", "docker-0123456789ab"),
            (
                "/docker/ID/system.slice/cron.service",
                "docker-0123456789ab",
            ),
            (
                "/user.slice/user-0.slice/libpod-ID.scope/container",
                "libpod-0123456789ab",
            ),
            ("/machine.slice/libpod-ID.scope", "libpod-0123456789ab"),
            (
                "/kubepods.slice/kubepods-podab_cd.slice/cri-containerd-ID.scope",
                "cri-containerd-0123456789ab",
            ),
            ("/kubepods/burstable/podab-cd/ID", "0123456789ab"),
            ("/system.slice:docker:ID", "docker-0123456789ab"),
            ("/machine.slice/machine-web.scope/payload/init.scope", "web"),
            (r"/machine.slice/machine-web\x2d1.scope/payload", "web-1"),
            ("/machine.slice/systemd-nspawn@db.service/payload", "db"),
            // A container in another one.
            (
                "/machine.slice/machine-web.scope/payload/system.slice/docker-ID.scope",
                "docker-0123456789ab",
            ),
            ("/lxc.payload.mail/system.slice/ssh.service", "mail"),
            (
                "/user.slice/app.slice/app-flatpak-org.example.Program-4711.scope",
                "org.example.Program",
            ),
        ] {
            let path = path.replace("ID", &id);
            let found = container_name(Some(&path), Some("host".to_owned()), Some(1));
            assert_eq!(found, expected, "{path}");
        }
    }

    #[test]
    fn other_containers_have_their_host_name_or_their_namespace() {
        let no_id = format!("/docker/{}", "x".repeat(64));
        for path in [
            None,
            Some("/"),
            Some(""),
            Some("/user.slice/user-0.slice/session-3.scope"),
            Some("/machine.slice/machine-.scope"),
            Some("/machine-x"),
            Some("/app-flatpak-x"),
            Some("/lxc.payload."),
            Some(no_id.as_str()),
        ] {
            for (host, namespace, expected) in [
                (Some("web"), Some(4711), "web"),
                (Some(""), Some(4711), "pid:[4711]"),
                (None, Some(4711), "pid:[4711]"),
                (None, None, "pid"),
            ] {
                let found = container_name(path, host.map(str::to_owned), namespace);
                assert_eq!(found, expected, "{path:?}");
            }
        }
    }

    #[test]
    fn escapes_are_undone_where_they_are_whole() {
        for (name, expected) in [
            (r"a\x2db\x20c", "a-b c"),
            (r"\x2d", "-"),
            (r"a\x", r"a\x"),
            (r"a\x2", r"a\x2"),
            (r"a\xzz", r"a\xzz"),
            (r"a\xé", r"a\xé"),
            (r"\xff", "\u{fffd}"),
        ] {
            assert_eq!(unescaped(name), expected);
        }
    }
}
