//! Function prototypes, looked up by function name or by a typedef of a function pointer.

use super::{Btf, Kind, TypeId};

/// The maximum number of parameters of a function, far above the kernel's own. Damaged types could
/// claim 65,535 for each.
const MAX_PARAMETERS: usize = 128;

/// A parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// The parameter's name; empty if the kernel's source names none.
    pub name: String,
    /// The parameter's type.
    pub type_id: TypeId,
    /// The parameter's type, as C writes it.
    pub type_name: String,
    /// Size of the type in bytes; above 8, the value is in more than one register or on the stack.
    pub size: u64,
}

/// A function's parameters and result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prototype {
    /// The named parameters, in order.
    pub parameters: Vec<Parameter>,
    /// Whether more arguments may follow (`...`).
    pub variadic: bool,
    /// The type of the return value, as C writes it.
    pub returns: String,
}

/// An error in looking up a prototype.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PrototypeError {
    /// The types do not describe the function.
    #[error(
        "BTF describes no function {name:?}: it does not exist, is assembly, or the compiler changed its \
         arguments"
    )]
    NoFunction {
        /// The requested name.
        name: String,
    },
    /// The types do not describe the typedef.
    #[error("BTF describes no typedef {name:?}")]
    NoTypedef {
        /// The requested name.
        name: String,
    },
    /// The record is damaged, or the typedef is not of a pointer to a function.
    #[error(
        "invalid BTF of {name:?}: expected a function's prototype, found type {found}; the types are damaged, or \
         {name:?} is something else"
    )]
    Damaged {
        /// The requested name.
        name: String,
        /// The number of the type found.
        found: u32,
    },
}

impl Btf {
    /// Returns the prototype of the function `name`. If several static functions share the name,
    /// this is one of them. Kernels leave out functions whose namesakes have other prototypes.
    ///
    /// # Errors
    /// If BTF does not describe the function.
    pub fn func_proto_args(&self, name: &str) -> Result<Prototype, PrototypeError> {
        let function = self
            .find(name, &[Kind::Function])
            .and_then(|id| self.record(id));
        let function = function.ok_or_else(|| PrototypeError::NoFunction {
            name: name.to_owned(),
        })?;
        self.prototype(name, TypeId(function.size_or_type))
    }

    /// Returns the prototype of the functions that variables of the typedef `name` point to:
    /// `typedef void (*name)(int);`. Compilers leave out the names of such parameters.
    ///
    /// # Errors
    /// If BTF does not describe the typedef, or describes it as something else.
    pub fn typedef_proto_args(&self, name: &str) -> Result<Prototype, PrototypeError> {
        let id = self
            .find(name, &[Kind::Typedef])
            .ok_or_else(|| PrototypeError::NoTypedef {
                name: name.to_owned(),
            })?;
        let pointer = self.bare(id).and_then(|id| self.record(id));
        let target = pointer
            .filter(|record| record.kind == Kind::Pointer)
            .and_then(|record| self.bare(TypeId(record.size_or_type)));
        self.prototype(name, target.unwrap_or(id))
    }

    /// Reads the prototype at `id`, which belongs to `name`.
    fn prototype(&self, name: &str, id: TypeId) -> Result<Prototype, PrototypeError> {
        let prototype = self
            .record(id)
            .filter(|record| record.kind == Kind::Prototype)
            .filter(|record| record.parameters().len() <= MAX_PARAMETERS)
            .ok_or_else(|| PrototypeError::Damaged {
                name: name.to_owned(),
                found: id.0,
            })?;
        // A last parameter without name and type stands for `...`.
        let variadic = prototype.parameters().last() == Some((0, TypeId(0)));
        let named = prototype.parameters().len() - usize::from(variadic);
        let parameters = prototype
            .parameters()
            .take(named)
            .map(|(name, type_id)| Parameter {
                name: self.name(name).to_owned(),
                type_id,
                type_name: self.type_name(type_id),
                size: self.size(type_id).unwrap_or(0),
            });
        Ok(Prototype {
            parameters: parameters.collect(),
            variadic,
            returns: self.type_name(TypeId(prototype.size_or_type)),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::test_types::{TestBtf, task_types};
    use super::*;
    use crate::test_says::assert_says;

    #[test]
    fn functions_of_absurdly_many_parameters_are_refused() {
        let mut types = TestBtf::default();
        let int = types.add("int", Kind::Int, 0, 4, &[32]);
        for (name, count, refused) in [("wide", 128, false), ("absurd", 0xffff, true)] {
            let parameters: Vec<u32> = std::iter::repeat_n([1, int], count).flatten().collect();
            let own = types.add("", Kind::Prototype, count as u32, int, &parameters);
            types.add(name, Kind::Function, 0, own, &[]);
            let btf = Btf::parse(&types.bytes()).unwrap();
            let found = btf.func_proto_args(name).map(|p| p.parameters.len());
            let damaged = PrototypeError::Damaged {
                name: name.to_owned(),
                found: own,
            };
            let expected = if refused { Err(damaged) } else { Ok(count) };
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn prototypes_tell_names_types_and_count() {
        let btf = Btf::parse(&task_types().bytes()).unwrap();
        for (name, parameters, variadic, returns) in [
            (
                "vfs_read",
                &[
                    ("mm", "struct mm_struct *", 8),
                    ("count", "long int", 8),
                    ("pid", "pid_t", 4),
                ][..],
                false,
                "long int",
            ),
            ("_printk", &[("fmt", "char *", 8)], true, "int"),
            ("schedule", &[], false, "void"),
        ] {
            let found = btf.func_proto_args(name).unwrap();
            let listed: Vec<(&str, &str, u64)> = found
                .parameters
                .iter()
                .map(|p| (p.name.as_str(), p.type_name.as_str(), p.size))
                .collect();
            assert_eq!(
                (listed.as_slice(), found.variadic, found.returns.as_str()),
                (parameters, variadic, returns)
            );
        }
        assert_says(
            btf.func_proto_args("vfs_reed").unwrap_err(),
            "no function \"vfs_reed\"",
        );
    }

    #[test]
    fn typedefs_of_pointers_to_functions_tell_types_and_count() {
        let mut t = TestBtf::default();
        let int = t.add("int", Kind::Int, 0, 4, &[32]);
        let void_pointer = t.add("", Kind::Pointer, 0, 0, &[]);
        let prototype = t.add("", Kind::Prototype, 2, 0, &[0, void_pointer, 0, int]);
        let pointer = t.add("", Kind::Pointer, 0, prototype, &[]);
        let direct = t.add("btf_trace_it", Kind::Typedef, 0, pointer, &[]);
        t.add("again", Kind::Typedef, 0, direct, &[]);
        let number = t.add("number", Kind::Typedef, 0, int, &[]);
        t.add("void_pointer", Kind::Typedef, 0, void_pointer, &[]);
        let endless = t.next();
        t.add("endless", Kind::Typedef, 0, endless, &[]);
        let btf = Btf::parse(&t.bytes()).unwrap();
        for name in ["btf_trace_it", "again"] {
            let found = btf.typedef_proto_args(name).unwrap();
            let types: Vec<_> = found.parameters.iter().map(|p| &p.type_name[..]).collect();
            assert_eq!(types, ["void *", "int"], "{name}");
            assert_eq!((found.variadic, &found.returns[..]), (false, "void"));
        }
        for (name, found) in [
            ("number", number),
            ("void_pointer", 0),
            ("endless", endless),
        ] {
            let damaged = PrototypeError::Damaged {
                name: name.to_owned(),
                found,
            };
            assert_eq!(btf.typedef_proto_args(name), Err(damaged));
        }
        let error = btf.typedef_proto_args("int").unwrap_err().to_string();
        assert_eq!(error, "BTF describes no typedef \"int\"");
    }
}
