//! The layouts of the structures that a script defines, as C has them on x86-64.
//!
//! A layout is made when a structure is first used. It is impossible if a member has an unknown
//! type, or is the structure itself.

use std::rc::Rc;

use super::types::{DEEPEST, Member, MemoryType, NoMember, Types, array, is_signed};

/// The greatest size in bytes of a structure that a script may define.
const LARGEST: u64 = 1 << 20;

/// The progress of a structure's layout.
#[derive(Clone)]
pub(super) enum State {
    Unknown,
    /// The layout has begun: a structure used again in this state contains itself.
    Begun,
    /// The layout is done; `None` if it is impossible.
    Done(Option<Rc<Layout>>),
}

/// The layout of a structure of the script's, as C does it on x86-64.
pub(super) struct Layout {
    /// The place of each member.
    members: Vec<Member>,
    pub(super) size: u64,
    pub(super) alignment: u64,
}

impl Types<'_> {
    /// Returns the layout of a structure of the script's, made once. It is `None` if a member has
    /// an unknown type, or is the structure itself.
    pub(super) fn layout(&self, at: usize) -> Option<Rc<Layout>> {
        let state = self.layouts.borrow().get(at).cloned();
        match state? {
            State::Done(layout) => return layout,
            State::Begun => return None,
            State::Unknown => {}
        }
        self.set_layout(at, State::Begun);
        let layout = self.lay_out(at).map(Rc::new);
        self.set_layout(at, State::Done(layout.clone()));
        layout
    }

    fn set_layout(&self, at: usize, state: State) {
        if let Some(place) = self.layouts.borrow_mut().get_mut(at) {
            *place = state;
        }
    }

    fn lay_out(&self, at: usize) -> Option<Layout> {
        let own = self.own.get(at)?;
        // The end in bits of the member before, and of all so far.
        let (mut members, mut bit, mut end, mut widest) = (Vec::new(), 0u64, 0u64, 1);
        for member in &own.members {
            let thing = self.named(&member.type_name)?;
            let elements = member.elements.iter().rev();
            let thing = elements.fold(thing, |of, elements| array(of, *elements));
            let alignment = self.alignment(&thing);
            let size = self.size(&thing)?.checked_mul(8)?;
            if own.is_union {
                bit = 0;
            }
            let width = match member.bits {
                // A bit field lies in one number of its type.
                Some(width @ 1..) if width <= size && bit % size + width <= size => width,
                Some(width) if width <= size => {
                    bit = bit.checked_next_multiple_of(size.max(8))?;
                    width
                }
                Some(_) => return None,
                None => {
                    bit = bit.checked_next_multiple_of(alignment.checked_mul(8)?)?;
                    size
                }
            };
            let bits = match member.bits {
                Some(width) => Some((u8::try_from(bit % 8).ok()?, u8::try_from(width).ok()?)),
                None => None,
            };
            members.push(Member {
                offset: bit / 8,
                bits,
                signed: is_signed(&thing),
                thing,
            });
            bit = bit.checked_add(width)?;
            end = end.max(bit);
            widest = widest.max(alignment);
            if end / 8 > LARGEST {
                return None;
            }
        }
        Some(Layout {
            members,
            size: end.div_ceil(8).checked_next_multiple_of(widest)?,
            alignment: widest,
        })
    }

    pub(super) fn own_member(&self, at: usize, name: &str) -> Result<Member, NoMember> {
        if let Some(found) = self.found_in(at, name, DEEPEST) {
            return Ok(found);
        }
        let own = self.own.get(at);
        let members = own.map_or(&[][..], |own| &own.members);
        let struct_name = own.map_or("", |own| own.name.as_str());
        let names = members.iter().map(|member| member.name.as_str());
        Err(NoMember {
            message: match members.iter().any(|member| member.name == name) {
                true => format!("struct {struct_name} has a member of an unknown type"),
                false => format!("struct {struct_name} has no member {name:?}"),
            },
            nearest: super::nearest(name, names.filter(|name| !name.is_empty())),
        })
    }

    /// Returns a member of a structure, or of a structure without a name inside it.
    fn found_in(&self, at: usize, name: &str, depth: usize) -> Option<Member> {
        let depth = depth.checked_sub(1)?;
        let (own, layout) = (self.own.get(at)?, self.layout(at)?);
        let mut all = own.members.iter().zip(&layout.members);
        let direct = all.clone().find(|(member, _)| member.name == name);
        if let Some((_, place)) = direct {
            return Some(place.clone());
        }
        all.find_map(|(member, place)| match place.thing {
            MemoryType::Own(inner) if member.name.is_empty() => {
                let found = self.found_in(inner, name, depth)?;
                Some(Member {
                    offset: place.offset + found.offset,
                    ..found
                })
            }
            _ => None,
        })
    }

    /// Adds the names of a structure's members; those of a structure without a name inside it count
    /// as its own.
    pub(super) fn add_member_names(&self, at: usize, names: &mut Vec<String>, depth: usize) {
        let Some(((own, layout), depth)) = self
            .own
            .get(at)
            .zip(self.layout(at))
            .zip(depth.checked_sub(1))
        else {
            return;
        };
        for (member, place) in own.members.iter().zip(&layout.members) {
            match place.thing {
                MemoryType::Own(inner) if member.name.is_empty() => {
                    self.add_member_names(inner, names, depth);
                }
                _ if member.name.is_empty() => {}
                _ => names.push(member.name.clone()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::types::Types;
    use super::*;
    use crate::ast::{Span, Structure, StructureMember, TypeName};

    #[test]
    fn structures_of_a_script_are_laid_out_as_c_does() {
        let member = |base: &str, name: &str, elements: Option<u64>| StructureMember {
            type_name: TypeName {
                like: None,
                base: base.into(),
                pointers: 0,
                elements: None,
                span: Span::default(),
            },
            name: name.into(),
            elements: elements.into_iter().collect(),
            bits: None,
        };
        let structure = |name: &str, members| Structure {
            name: name.into(),
            is_union: false,
            members,
            span: Span::default(),
        };
        let own = [
            structure(
                "inner",
                vec![member("uint8", "a", None), member("uint32", "b", None)],
            ),
            structure(
                "outer",
                vec![
                    member("uint8", "c", Some(3)),
                    member("struct inner", "d", None),
                    member("uint64", "e", None),
                    member("uint16", "f", None),
                ],
            ),
            structure("endless", vec![member("struct endless", "g", None)]),
        ];
        let types = Types::new(None, &own, &[]);
        let offset =
            |of: usize, name: &str| types.member(&MemoryType::Own(of), name).map(|m| m.offset);
        assert_eq!(types.size(&MemoryType::Own(0)), Some(8));
        assert_eq!(types.size(&MemoryType::Own(1)), Some(32));
        for (name, expected) in [("c", 0), ("d", 4), ("e", 16), ("f", 24)] {
            assert_eq!(offset(1, name), Ok(expected), "{name}");
        }
        assert_eq!(types.size(&MemoryType::Own(2)), None);
        let error = offset(2, "g").unwrap_err();
        assert_eq!(
            error.message,
            "struct endless has a member of an unknown type"
        );
        let error = offset(1, "x").unwrap_err();
        assert_eq!(error.message, "struct outer has no member \"x\"");
    }
}
