//! Compiles statements: operations that leave nothing on the stack.

use super::extent::Extent;
use super::types::Type;
use super::variables::is_histogram;
use super::{Loop, RuleCompiler};
use crate::ast::{
    Aggregation, BinaryOperator, Block, Expression, Lvalue, LvalueKind, Span, Statement,
    StatementKind,
};
use crate::check::strict;
use crate::maps::MapKind;
use crate::program::{Emission, Operation};
use crate::value::Value;

impl RuleCompiler<'_, '_> {
    /// Compiles a block. Local variables live as long as the rule: they may be set in a branch and
    /// read behind it.
    pub(super) fn block(&mut self, block: &Block) {
        for statement in &block.statements {
            self.statement(statement);
        }
    }

    /// Compiles the end of btrace(8) with a message.
    pub(super) fn abort(&mut self, message: &str) {
        let message = format!("exotrace: {message}").into();
        self.emit(Emission::Fail { message }, &[]);
        self.put(Operation::Abort);
    }

    fn statement(&mut self, statement: &Statement) {
        let span = statement.span;
        if self.is_strict() && strict::has_too_deep(statement) {
            self.abort(strict::TOO_MANY_OPERANDS);
        }
        match &statement.kind {
            StatementKind::Assign {
                place,
                operator,
                value,
            } => self.assign(place, *operator, value),
            StatementKind::Aggregate {
                place,
                aggregation,
                value,
                ..
            } => self.aggregate(place, *aggregation, value.as_ref()),
            StatementKind::Expression(expression) => self.effect(expression),
            StatementKind::Declare { variable } => {
                self.declared.insert(variable.clone());
            }
            StatementKind::If {
                condition,
                then,
                otherwise,
            } => {
                match self.known_truth(condition) {
                    Some(true) => return self.block(then),
                    Some(false) => return self.block(otherwise),
                    None => {}
                }
                self.value(condition);
                let no = self.jump(Operation::JumpIfZero);
                self.block(then);
                if otherwise.statements.is_empty() {
                    return self.land(no);
                }
                let end = self.jump(Operation::Jump);
                self.land(no);
                self.block(otherwise);
                self.land(end);
            }
            StatementKind::While { condition, body } => {
                let again = self.here();
                self.value(condition);
                let out = self.jump(Operation::JumpIfZero);
                self.looped(body, Some(again), false);
                self.put(Operation::Jump(again));
                self.land(out);
                self.end_loop();
            }
            StatementKind::Repeat { times, body } => {
                let slot = self.new_slot();
                self.value(times);
                self.put(Operation::SetLocal(slot));
                let zero = Operation::Constant(Value::ZERO);
                self.counted(slot, BinaryOperator::Greater, zero, -1, body);
            }
            StatementKind::ForRange {
                variable,
                first,
                end,
                body,
            } => {
                let limit = self.new_slot();
                self.value(first);
                let slot = self.local(variable, Type::Number);
                self.put(Operation::SetLocal(slot));
                self.value(end);
                self.put(Operation::SetLocal(limit));
                let limit = Operation::Local(limit);
                self.counted(slot, BinaryOperator::Less, limit, 1, body);
            }
            StatementKind::ForMap {
                variable,
                map,
                body,
            } => self.for_map(variable, map, body, span),
            StatementKind::Break => self.leave(span, true),
            StatementKind::Continue => self.leave(span, false),
            StatementKind::Return(value) => self.give_back(value.as_ref(), span),
        }
    }

    fn assign(&mut self, place: &Lvalue, operator: Option<BinaryOperator>, value: &Expression) {
        match &place.kind {
            LvalueKind::Local(name) => {
                let mut of = self.local_operand(name, operator, place.span);
                let known = self.locals.iter().rev().find(|local| local.name == *name);
                let known = known.map(|local| local.of.clone());
                let mut found = self.value(value);
                if let Some(known) = known.filter(|_| operator.is_none()) {
                    found = self.arrange(found, &known);
                }
                let extent = match operator {
                    Some(_) => Extent::WHOLE,
                    None => self.extent.clone(),
                };
                of = match operator {
                    Some(operator) => {
                        of = self.changed(operator, of);
                        self.put(Operation::Binary(operator));
                        of
                    }
                    None => found,
                };
                let slot = self.local(name, of);
                self.widen(name, extent);
                self.put(Operation::SetLocal(slot));
            }
            LvalueKind::Global { name, keys } => {
                let Some(map) = self.map(name, keys.len(), place.span) else {
                    return;
                };
                if self.shared.kind_of(map) != MapKind::Scalar && !self.is_strict() {
                    self.refuse(place.span, format!("@{name} gathers values by a function such as count(); it cannot be assigned to"));
                    return;
                }
                let keys = self.keys(map, keys);
                let mut of = self.value(value);
                if operator.is_none() {
                    of = self.arrange(of, &self.type_of(map));
                }
                let extent = self.extent.clone();
                match operator {
                    Some(operator) => {
                        self.must_be_number(&of, value.span);
                        let of = self.changed(operator, self.type_of(map));
                        self.put(Operation::UpdateGlobal {
                            map,
                            keys,
                            operator,
                        });
                        self.learn_map(map, of, Extent::WHOLE);
                    }
                    None => {
                        self.put(Operation::SetGlobal { map, keys });
                        self.learn_map(map, of, extent);
                    }
                }
            }
        }
    }

    /// Puts the variable's value before the change, for `$x op= value`.
    fn local_operand(&mut self, name: &str, operator: Option<BinaryOperator>, span: Span) -> Type {
        if operator.is_none() {
            return Type::Any;
        }
        let known = self.locals.iter().any(|local| local.name == name);
        if !known && !self.declared.contains(name) {
            self.refuse(span, format!("${name} is read before it is set"));
            return Type::Number;
        }
        let of = self.type_of_local(name);
        let slot = self.local(name, of.clone());
        self.put(Operation::Local(slot));
        of
    }

    /// Returns the type of `variable op= number` for a variable of the type `of`, and scales the
    /// number that has just been put if that is a pointer, as in C.
    fn changed(&mut self, operator: BinaryOperator, of: Type) -> Type {
        let is_sum = matches!(operator, BinaryOperator::Add | BinaryOperator::Subtract);
        if !is_sum {
            return Type::Number;
        }
        let of = self.stepped(of);
        self.scale(&of);
        of
    }

    fn aggregate(&mut self, place: &Lvalue, aggregation: Aggregation, value: Option<&Expression>) {
        let LvalueKind::Global { name, keys } = &place.kind else {
            self.refuse(place.span, "values are aggregated in maps: @x = count()");
            return;
        };
        let Some(map) = self.map(name, keys.len(), place.span) else {
            return;
        };
        if let MapKind::Aggregation(declared) = self.shared.kind_of(map)
            && declared != aggregation
        {
            self.refuse(
                place.span,
                format!("@{name} is aggregated by one function elsewhere and by another here"),
            );
            return;
        }
        let keys = self.keys(map, keys);
        match (aggregation, value) {
            (Aggregation::Count, None) => self.put(Operation::Count { map, keys }),
            _ => {
                match value {
                    Some(_) => self.number(value),
                    None => self.constant(1),
                };
                self.put(Operation::Aggregate {
                    map,
                    keys,
                    aggregation,
                });
            }
        }
        if !is_histogram(aggregation) {
            self.learn_map(map, Type::Number, Extent::WHOLE);
        }
    }

    /// Compiles the body of a loop; `again` is the target of `continue`, if it is known.
    fn looped(&mut self, body: &Block, again: Option<usize>, is_of_map: bool) {
        self.loops.push(Loop {
            is_of_map,
            ..Loop::default()
        });
        self.block(body);
        let to = again.unwrap_or_else(|| self.here());
        let continues = self
            .loops
            .last_mut()
            .map(|l| std::mem::take(&mut l.continues));
        for from in continues.unwrap_or_default() {
            self.lead(from, to);
        }
    }

    /// Leads the breaks of the innermost loop here, and checks whether there are any.
    fn end_loop(&mut self) -> bool {
        let breaks = self.loops.pop().unwrap_or_default().breaks;
        breaks.iter().for_each(|from| self.land(*from));
        !breaks.is_empty()
    }

    /// Compiles a loop over numbers that goes on until `condition` leaves 0.
    fn counted(
        &mut self,
        slot: usize,
        operator: BinaryOperator,
        limit: Operation,
        by: i64,
        body: &Block,
    ) {
        let again = self.here();
        self.put(Operation::Local(slot));
        self.put(limit);
        self.put(Operation::Binary(operator));
        let out = self.jump(Operation::JumpIfZero);
        self.looped(body, None, false);
        self.put(Operation::StepLocal {
            slot,
            by,
            postfix: false,
        });
        self.put(Operation::Drop);
        self.put(Operation::Jump(again));
        self.land(out);
        self.end_loop();
    }

    fn for_map(&mut self, variable: &str, name: &str, body: &Block, span: Span) {
        let Some(map) = self.shared.map_numbers.get(name).copied() else {
            self.refuse(span, format!("@{name} is not used anywhere else"));
            return;
        };
        let key = self.shared.maps.get(map).and_then(|map| map.key.clone());
        let item = Type::Tuple(vec![key.unwrap_or(Type::Any), self.type_of(map)]);
        let extents = [1, 0].map(|which| self.extent_of_map(map, which));
        let extents = extents.map(|extent| extent.unwrap_or(Extent::Unknown));
        let slot = self.local(variable, item);
        self.widen(variable, Extent::Items(extents.into()));
        self.put(Operation::Iterate(map));
        let again = self.here();
        self.put(Operation::Next {
            slot,
            end: usize::MAX,
        });
        self.looped(body, Some(again), true);
        self.put(Operation::Jump(again));
        // `break` ends the iteration over the map; its own end does so by itself.
        if self.end_loop() {
            self.put(Operation::EndIteration);
        }
        self.land(again);
    }

    fn leave(&mut self, span: Span, is_break: bool) {
        if self.loops.is_empty() {
            let word = if is_break { "break" } else { "continue" };
            let why = match self.operands > 0 {
                true => "of a block with a value; put the loop into it",
                false => "of a loop",
            };
            self.refuse(span, format!("{word} outside {why}"));
            return;
        }
        let from = self.jump(Operation::Jump);
        if let Some(around) = self.loops.last_mut() {
            match is_break {
                true => around.breaks.push(from),
                false => around.continues.push(from),
            }
        }
    }
}
