//! The properties of a value for a tracer: its number of bytes, its sign, and the register in which
//! it can stay as it is.

/// A value that a probe can pass: integers, `bool`, `char`, and pointers and references to types
/// whose size the compiler knows.
///
/// Floating point, slices, strings and structures do not fit in one register: pass a pointer to
/// them.
pub trait Value: Copy {
    /// The number of bytes of the value, negative if it is signed: the number before `@` in a
    /// note's argument.
    const SIZE: i32;

    /// Whether the value takes [`wide`](Self::wide)'s register rather than
    /// [`narrow`](Self::narrow)'s.
    const IS_WIDE: bool = Self::SIZE.abs() == 8;

    /// Returns the value in a 64-bit register. It is meant for values of 8 bytes only, for which it
    /// is no instruction.
    fn wide(self) -> u64;

    /// Returns the value in a 32-bit register; the bits above [`SIZE`](Self::SIZE) are undefined.
    /// It is meant for values of at most 4 bytes.
    fn narrow(self) -> u32;
}

macro_rules! integers {
    ($($integer:ident $size:literal),*) => {$(
        #[allow(clippy::cast_lossless, reason = "signed and unsigned ones alike")]
        impl Value for $integer {
            const SIZE: i32 = $size;
            #[inline(always)]
            fn wide(self) -> u64 {
                self as u64
            }
            #[inline(always)]
            fn narrow(self) -> u32 {
                self as u32
            }
        }
    )*};
}

integers!(i8 -1, i16 -2, i32 -4, i64 -8, isize -8, u8 1, u16 2, u32 4, u64 8, usize 8, bool 1, char 4);

macro_rules! pointers {
    ($($(#[$meta:meta])* [$($generic:tt)*] $pointer:ty, $value:ident => $address:expr;)*) => {$(
        impl<$($generic)*> Value for $pointer {
            const SIZE: i32 = 8;
            #[inline(always)]
            fn wide(self) -> u64 {
                let $value = self;
                $address
            }
            #[inline(always)]
            fn narrow(self) -> u32 {
                self.wide() as u32
            }
        }
    )*};
}

// Exposed addresses: the tracer reads the memory behind them.
pointers! {
    [T] *const T, pointer => pointer.expose_provenance() as u64;
    [T] *mut T, pointer => pointer.expose_provenance() as u64;
    [T] &T, reference => core::ptr::from_ref(reference).wide();
    [T] Option<&T>, reference => reference.map_or(0, Value::wide);
    [T] core::ptr::NonNull<T>, pointer => pointer.as_ptr().wide();
    [T] Option<core::ptr::NonNull<T>>, pointer => pointer.map_or(0, Value::wide);
}
