//! Values of system calls as strace(1) shows them, as far as one register tells: numbers in
//! decimal, modes in octal, flags of open(2) by name, errors with their text.

use std::io;

use probes::syscall_table::Argument;

/// The directory descriptor that stands for the working directory (AT_FDCWD).
const WORKING_DIRECTORY: i32 = -100;
/// The largest number of an error that programs see (EHWPOISON).
const LARGEST_ERROR: u64 = 133;
/// The bits of open(2)'s flags that say how the file is accessed (O_ACCMODE).
const ACCESS: u64 = 3;
/// The other flags of open(2) on x86-64. Those of several bits come before those that they contain.
const OPEN_FLAGS: [(u64, &str); 15] = [
    (0o100, "O_CREAT"),
    (0o200, "O_EXCL"),
    (0o400, "O_NOCTTY"),
    (0o1000, "O_TRUNC"),
    (0o2000, "O_APPEND"),
    (0o4000, "O_NONBLOCK"),
    (0o4_010_000, "O_SYNC"),
    (0o10_000, "O_DSYNC"),
    (0o20_000, "O_ASYNC"),
    (0o40_000, "O_DIRECT"),
    (0o100_000, "O_LARGEFILE"),
    (0o20_200_000, "O_TMPFILE"),
    (0o200_000, "O_DIRECTORY"),
    (0o400_000, "O_NOFOLLOW"),
    (0o2_000_000, "O_CLOEXEC"),
];

/// Returns an argument of the system call `call`. Upper bits that its type does not have are
/// ignored.
pub(super) fn argument(call: &str, argument: &Argument, value: u64) -> String {
    let Argument {
        type_name, name, ..
    } = *argument;
    let (word, number) = (value as u32, (value as u32).cast_signed());
    let has_bits = name.contains("flag") || ["cmd", "prot", "mask", "options"].contains(&name);
    match type_name {
        _ if type_name.contains('*') && value == 0 => "NULL".to_owned(),
        "umode_t" => format!("0{word:o}"),
        "int" if name == "flags" && matches!(call, "open" | "openat") => open_flags(word.into()),
        "int" | "unsigned int" | "unsigned" if has_bits => format!("{word:#x}"),
        "int" if name.ends_with("dfd") && number == WORKING_DIRECTORY => "AT_FDCWD".to_owned(),
        "int" | "pid_t" | "clockid_t" | "key_t" | "mqd_t" | "timer_t" => number.to_string(),
        "unsigned int" | "unsigned" | "u32" | "__u32" | "uid_t" | "gid_t" => word.to_string(),
        "long" | "loff_t" | "off_t" => value.cast_signed().to_string(),
        "size_t" => value.to_string(),
        "unsigned long" if name == "fd" => number.to_string(),
        "unsigned long" if ["len", "size", "vlen"].contains(&name) => value.to_string(),
        _ => format!("{value:#x}"),
    }
}

/// Returns the names of open(2)'s flags.
fn open_flags(flags: u64) -> String {
    let access = ["O_RDONLY", "O_WRONLY", "O_RDWR", "O_ACCMODE"];
    let mut names: Vec<String> = Vec::new();
    let access = access.get((flags & ACCESS) as usize);
    names.extend(access.map(|name| (*name).to_owned()));
    let mut rest = flags & !ACCESS;
    for (bits, name) in OPEN_FLAGS {
        if rest & bits == bits {
            rest &= !bits;
            names.push(name.to_owned());
        }
    }
    if rest != 0 {
        names.push(format!("{rest:#x}"));
    }
    names.join("|")
}

/// Returns the text of the error that a system call has returned; empty if it has not failed, or
/// the number never leaves the kernel.
pub(super) fn error(returned: u64) -> String {
    let number = returned.wrapping_neg();
    if number == 0 || number > LARGEST_ERROR {
        return String::new();
    }
    let text = io::Error::from_raw_os_error(number as i32).to_string();
    let end = text.rfind(" (os error ").unwrap_or(text.len());
    format!(" ({})", text.get(..end).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use probes::syscall_table::by_name;

    use super::*;

    #[test]
    fn arguments_are_shown_by_their_types() {
        for (call, at, value, shown) in [
            ("openat", 0, 0xffff_ff9c, "AT_FDCWD"),
            ("openat", 2, 0, "O_RDONLY"),
            ("openat", 2, 0o1101, "O_WRONLY|O_CREAT|O_TRUNC"),
            ("openat", 2, 0o4_010_002, "O_RDWR|O_SYNC"),
            ("openat", 2, 0o20_210_002, "O_RDWR|O_DSYNC|O_TMPFILE"),
            ("openat", 2, 0x8000_0000, "O_RDONLY|0x80000000"),
            ("openat", 3, 0o644, "0644"),
            ("openat", 3, 0, "00"),
            ("write", 0, 0xdead_0000_0003, "3"),
            ("write", 1, 0x40_1800, "0x401800"),
            ("write", 1, 0, "NULL"),
            ("write", 2, 87, "87"),
            ("wait4", 0, u64::MAX, "-1"),
            ("ioctl", 1, 0x5413, "0x5413"),
            ("mmap", 1, 4096, "4096"),
            ("mmap", 4, u64::MAX, "-1"),
            ("lseek", 1, u64::MAX, "-1"),
            ("arch_prctl", 1, u64::MAX, "0xffffffffffffffff"),
        ] {
            let found = by_name(call).and_then(|call| call.arguments.get(at));
            let found = found.map(|of| argument(call, of, value));
            assert_eq!(found.as_deref(), Some(shown), "{call} {at}");
        }
    }

    #[test]
    fn errors_have_their_text() {
        for (returned, shown) in [
            (0, ""),
            (3, ""),
            (2u64.wrapping_neg(), " (No such file or directory)"),
            // ERESTARTSYS
            (512u64.wrapping_neg(), ""),
        ] {
            assert_eq!(error(returned), shown, "{returned}");
        }
    }
}
