//! Executable memory of this process: one area, allocated once, in places of equal size.
//!
//! The area is mapped twice, to be written and to be executed. No page is ever both, and no mapping
//! changes later. A process that is confined may then be forbidden to make anything executable. The
//! area is allocated by [`prepare`], or when the first place is requested.
//!
//! A place is used by the thread that has requested it. That thread has executed CPUID since the
//! place was written. A CPU requires that before it executes bytes that were written through
//! another address (SDM volume 3, 9.1.3).

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr::{self, NonNull};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The size of a place in bytes. Code for an instruction needs about 300.
const PLACE: usize = 512;
/// The size of the area in bytes. Only pages that were used are allocated.
const AREA: usize = 4 << 20;
const PLACES: usize = AREA / PLACE;

/// The area and its places.
struct Area {
    writable: NonNull<u8>,
    executable: NonNull<u8>,
    places: Mutex<Places>,
}

// SAFETY: the mappings live as long as the process. A place in them belongs to the one `Place` that
// has its number.
unsafe impl Send for Area {}
// SAFETY: as above. The numbers are handed out under a lock.
unsafe impl Sync for Area {}

/// The numbers of the free places: those that were returned, and all from `fresh` on.
#[derive(Default)]
struct Places {
    returned: Vec<usize>,
    fresh: usize,
}

static ON_DEMAND: OnceLock<Result<Area, &'static str>> = OnceLock::new();

/// Allocates the area, unless it exists. If the host forbids it, the first run of code reports
/// that.
pub(super) fn prepare() {
    let _ = area();
}

fn area() -> Result<&'static Area, &'static str> {
    ON_DEMAND
        .get_or_init(Area::new)
        .as_ref()
        .map_err(|why| *why)
}

impl Area {
    fn new() -> Result<Self, &'static str> {
        // SAFETY: the name is a NUL-terminated literal and the flags are valid. The result is
        // checked.
        let fd = unsafe { libc::memfd_create(c"exotrace-code".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err("no memory for host code");
        }
        // SAFETY: `fd` was just returned by memfd_create, and nobody else owns it.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(AREA as u64)
            .map_err(|_| "no memory for host code")?;
        let map = |protection| {
            // SAFETY: a mapping at an address of the kernel's choice replaces no other. It is never
            // unmapped.
            let address = unsafe {
                libc::mmap(
                    ptr::null_mut(),
                    AREA,
                    protection,
                    libc::MAP_SHARED,
                    file.as_raw_fd(),
                    0,
                )
            };
            NonNull::new(address.cast::<u8>()).filter(|_| address != libc::MAP_FAILED)
        };
        let writable = map(libc::PROT_READ | libc::PROT_WRITE).ok_or("no memory for host code")?;
        let executable =
            map(libc::PROT_READ | libc::PROT_EXEC).ok_or("the host forbids executable memory")?;
        Ok(Self {
            writable,
            executable,
            places: Mutex::default(),
        })
    }

    fn take(&self) -> Option<usize> {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.returned.pop().or_else(|| {
            let number = places.fresh;
            places.fresh += usize::from(number < PLACES);
            (number < PLACES).then_some(number)
        })
    }

    fn give_back(&self, number: usize) {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.returned.push(number);
    }
}

/// A place with code in it. Dropping it returns the place.
pub(super) struct Place {
    area: &'static Area,
    number: usize,
}

impl Place {
    /// Puts `code` into a place.
    ///
    /// # Errors
    /// If it is too long, all places are in use, or the host forbids executable memory.
    pub(super) fn with(code: &[u8]) -> Result<Self, &'static str> {
        if code.len() > PLACE {
            return Err("its host code is too long");
        }
        let area = area()?;
        let number = area.take().ok_or("no room for more host code")?;
        let place = Self { area, number };
        // SAFETY: the number is below PLACES, so the place lies in the writable mapping. It is no
        // other `Place`'s, so nothing reads or executes it. `code` is no longer than a place.
        unsafe {
            let to = area.writable.add(number * PLACE).as_ptr();
            ptr::copy_nonoverlapping(code.as_ptr(), to, code.len());
        }
        // CPUID serializes, so that nothing that was fetched from the place before is executed.
        std::arch::x86_64::__cpuid(0);
        Ok(place)
    }

    pub(super) fn address(&self) -> NonNull<u8> {
        // SAFETY: the number is below PLACES, so the place lies in the executable mapping.
        unsafe { self.area.executable.add(self.number * PLACE) }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.area.give_back(self.number);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn code_runs_where_it_was_put_and_no_page_is_writable_and_executable() {
        // mov eax, N; ret
        let code = |value: u8| [0xb8, value, 0, 0, 0, 0xc3];
        let places: Vec<Place> = (0..9).map(|n| Place::with(&code(n)).unwrap()).collect();
        drop(Place::with(&[0xc3; PLACE]).unwrap());
        assert!(Place::with(&[0xc3; PLACE + 1]).is_err());
        for (place, value) in places.iter().zip(0..) {
            // SAFETY: the place holds a whole function without arguments that returns a number.
            let function: extern "sysv64" fn() -> u32 =
                unsafe { std::mem::transmute(place.address().as_ptr()) };
            assert_eq!(function(), value);
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let of_ours: Vec<_> = maps
            .lines()
            .filter(|l| l.contains("exotrace-code"))
            .collect();
        assert_eq!(of_ours.len(), 2);
        assert!(!maps.lines().any(|line| line.contains(" rwx")), "{maps}");
    }
}
