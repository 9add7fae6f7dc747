//! An assembler with functions: iced's, with named labels and, afterwards, each function's address
//! and size.
//!
//! The caller owns the order of the code. This names functions; it does not align, link or
//! relocate.

use std::collections::BTreeMap;

use iced_x86::code_asm::{CodeAssembler, CodeLabel};
use iced_x86::{BlockEncoderOptions, IcedError};

/// The micro guest could not be assembled. Only this crate's own source can cause that.
#[derive(Debug, thiserror::Error)]
pub enum AssembleError {
    /// An instruction has no encoding, or a label was never set.
    #[error("cannot encode the micro guest: {0}")]
    Encode(#[from] IcedError),
    /// A function is used by name and defined nowhere.
    #[error("the micro guest has no function {0}")]
    NoFunction(&'static str),
    /// The file cannot be written.
    #[error("cannot write the micro guest's file: {0}")]
    File(#[from] object::build::Error),
    /// A part does not fit at its address in the layout.
    #[error("{part} of the micro guest takes {size:#x} bytes, and {room:#x} are set aside for it")]
    NoRoom {
        /// The part's name.
        part: &'static str,
        /// The size of the part in bytes.
        size: u64,
        /// The room in bytes.
        room: u64,
    },
}

/// A function or object of the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Symbol {
    /// The name; all start with `micro_`.
    pub name: &'static str,
    /// The address of the first byte.
    pub address: u64,
    /// The size in bytes.
    pub size: u64,
}

/// Machine code and the functions in it.
#[derive(Debug, Clone)]
pub struct Code {
    /// The bytes, from the address given to [`Assembler::finish`].
    pub bytes: Vec<u8>,
    /// The functions in ascending order, back to back.
    pub symbols: Vec<Symbol>,
}

impl Code {
    /// Returns the address of the function `name`.
    ///
    /// # Errors
    /// If there is none.
    pub fn address(&self, name: &'static str) -> Result<u64, AssembleError> {
        self.symbol(name).map(|symbol| symbol.address)
    }

    /// Returns the size of the function `name` in bytes.
    ///
    /// # Errors
    /// If there is none.
    pub fn size(&self, name: &'static str) -> Result<u64, AssembleError> {
        self.symbol(name).map(|symbol| symbol.size)
    }

    fn symbol(&self, name: &'static str) -> Result<&Symbol, AssembleError> {
        let mut symbols = self.symbols.iter();
        symbols
            .find(|symbol| symbol.name == name)
            .ok_or(AssembleError::NoFunction(name))
    }
}

/// iced's assembler with functions by name.
pub struct Assembler {
    /// iced's assembler, for the instructions.
    pub code: CodeAssembler,
    labels: BTreeMap<&'static str, CodeLabel>,
    /// The name and the index of the first instruction of each function.
    functions: Vec<(&'static str, usize)>,
}

impl Assembler {
    /// Makes an empty program for 16 or 64-bit mode.
    ///
    /// # Errors
    /// If iced knows no such mode.
    pub fn new(bits: u32) -> Result<Self, IcedError> {
        Ok(Self {
            code: CodeAssembler::new(bits)?,
            labels: BTreeMap::new(),
            functions: Vec::new(),
        })
    }

    /// Starts the function `name`; the one before ends here.
    ///
    /// # Errors
    /// If there is one of this name already, or the one before is empty.
    pub fn function(&mut self, name: &'static str) -> Result<(), IcedError> {
        let start = self.code.instructions().len();
        let mut label = self.label(name);
        self.code.set_label(&mut label)?;
        self.labels.insert(name, label);
        self.functions.push((name, start));
        Ok(())
    }

    /// Returns the label of a function, which may be defined later.
    pub fn label(&mut self, name: &'static str) -> CodeLabel {
        let code = &mut self.code;
        *self
            .labels
            .entry(name)
            .or_insert_with(|| code.create_label())
    }

    /// Encodes everything for `address`.
    ///
    /// # Errors
    /// If a label was used but never set, or an instruction cannot be encoded.
    pub fn finish(mut self, address: u64) -> Result<Code, AssembleError> {
        let result = self
            .code
            .assemble_options(address, BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS)?;
        let bytes = result.inner.code_buffer;
        let offsets = result.inner.new_instruction_offsets;
        let start_of = |index: usize| {
            let offset = offsets
                .get(index)
                .copied()
                .map_or(bytes.len() as u64, u64::from);
            address + offset
        };
        // The last function ends with the code: no instruction has that index.
        let ends = self.functions.iter().skip(1).map(|(_, start)| *start);
        let symbols = self
            .functions
            .iter()
            .zip(ends.chain([usize::MAX]))
            .map(|(&(name, start), end)| Symbol {
                name,
                address: start_of(start),
                size: start_of(end) - start_of(start),
            })
            .collect();
        Ok(Code { bytes, symbols })
    }
}
