//! Reading of guest memory as it is without any site: each int3 of ours is replaced by its original
//! byte.

use introspect::x86_64::paging::{self, AddressSpace};
use introspect::{Gpa, Gva, PhysicalMemory};

use super::super::return_target;
use super::{Entries, INT3, SiteId, TrapTable};
use crate::memory::PAGE_SIZE;
use crate::x86_64::LONGEST_INSTRUCTION;

impl TrapTable {
    /// Reads guest-physical memory as it is without any site.
    ///
    /// # Errors
    /// If the range is not RAM.
    pub fn read_unpatched(
        &self,
        address: Gpa,
        buf: &mut [u8],
    ) -> Result<(), introspect::PhysicalReadError> {
        let entries = self.lock();
        self.ram.read_physical(address, buf)?;
        overlay(&entries, address, buf);
        Ok(())
    }

    /// Reads code as it is without any site. The result is empty if nothing is mapped. It may be
    /// shorter than an instruction if the next page is missing.
    pub fn read_code(&self, address: Gva, space: AddressSpace) -> Vec<u8> {
        self.original_code(&self.lock(), address, space)
    }

    /// Reads up to `length` bytes of code as [`Self::read_code`] does.
    pub(crate) fn read_code_of(&self, address: Gva, space: AddressSpace, length: usize) -> Vec<u8> {
        self.original_bytes(&self.lock(), address, space, length)
    }

    /// Checks whether code returns to `address`, by the code before it without any site.
    ///
    /// An instruction must end there. It must be a call, or a no-operation as before trampolines.
    pub fn is_returned_to(&self, address: Gva, space: AddressSpace) -> bool {
        let looked_at = return_target::LOOKED_AT as u64;
        let entries = self.lock();
        // The page before the address may be missing.
        [looked_at, looked_at.min(address.0 % PAGE_SIZE)]
            .into_iter()
            .map(|length| {
                let start = Gva(address.0.wrapping_sub(length));
                let code = self.original_bytes(&entries, start, space, length as usize);
                (code, length)
            })
            .find(|(code, length)| code.len() as u64 == *length)
            .is_some_and(|(code, _)| return_target::ends_with_call(&code))
    }

    /// Does the work of [`Self::read_code`] with the lock held.
    pub(super) fn original_code(
        &self,
        entries: &Entries,
        address: Gva,
        space: AddressSpace,
    ) -> Vec<u8> {
        self.original_bytes(entries, address, space, LONGEST_INSTRUCTION)
    }

    /// Reads up to `length` bytes as they are without any site. Returns fewer if a page after the
    /// first is missing.
    fn original_bytes(
        &self,
        entries: &Entries,
        address: Gva,
        space: AddressSpace,
        length: usize,
    ) -> Vec<u8> {
        let mut code = vec![0; length];
        let mut done = 0;
        while done < code.len() {
            let at = Gva(address.0.wrapping_add(done as u64));
            let Ok(translation) = paging::translate(&self.ram, space, at) else {
                break;
            };
            let in_page = (PAGE_SIZE - at.0 % PAGE_SIZE) as usize;
            let end = code.len().min(done + in_page);
            let piece = code.get_mut(done..end).unwrap_or_default();
            if self.ram.read_physical(translation.gpa, piece).is_err() {
                break;
            }
            overlay(entries, translation.gpa, piece);
            done = end;
        }
        code.truncate(done);
        code
    }
}

/// Replaces the int3s of sites in `buf`, read from memory at `address`, by the original bytes.
pub(super) fn overlay(entries: &Entries, address: Gpa, buf: &mut [u8]) {
    let end = Gpa(address.0.saturating_add(buf.len() as u64));
    for (id, entry) in entries.by_id.range(SiteId(address)..SiteId(end)) {
        let offset = usize::try_from(id.0.0 - address.0).unwrap_or(usize::MAX);
        if entry.is_in()
            && let Some(byte) = buf.get_mut(offset)
            && *byte == INT3
        {
            *byte = entry.site.original;
        }
    }
}
