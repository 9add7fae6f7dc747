//! Prints a script's tree as text, for tests: operators before their operands, all in parentheses.

use crate::ast::{
    Aggregation, BinaryOperator, Block, Expression, ExpressionKind, Lvalue, LvalueKind, ProbeKind,
    Script, Statement, StatementKind, TypeName, UnaryOperator,
};
use crate::names;

/// Returns all of a script, one line for each statement of a rule.
pub fn script(of: &Script) -> String {
    let mut out = String::new();
    for structure in &of.structures {
        out += &format!("(struct {}", structure.name);
        for member in &structure.members {
            out += &format!(" ({} {}", type_name(&member.type_name), member.name);
            for elements in &member.elements {
                out += &format!(" {elements}");
            }
            out.push(')');
        }
        out += ")\n";
    }
    for translator in &of.translators {
        out += &format!(
            "(translator {} {} {}",
            type_name(&translator.output),
            type_name(&translator.input),
            translator.variable
        );
        for (name, value) in &translator.members {
            out += &format!("\n  ({name} {})", expression(value));
        }
        out += ")\n";
    }
    for rule in &of.rules {
        out += "(rule";
        for probe in &rule.probes {
            match &probe.kind {
                ProbeKind::Begin => out += " BEGIN",
                ProbeKind::End => out += " END",
                ProbeKind::Iteration(iteration) => out += &format!(" {}", iteration.name()),
                ProbeKind::Pattern(text) => out += &format!(" {text}"),
            }
        }
        if let Some(filter) = &rule.filter {
            out += &format!(" (filter {})", expression(filter));
        }
        for one in &rule.body.statements {
            out += &format!("\n  {}", statement(one));
        }
        out += ")\n";
    }
    out
}

fn type_name(of: &TypeName) -> String {
    let base = match &of.like {
        Some(like) => format!("typeof {}", expression(like)),
        None => of.base.clone(),
    };
    format!("\"{base}{}\"", "*".repeat(of.pointers))
}

fn block(of: &Block) -> String {
    let statements: Vec<String> = of.statements.iter().map(statement).collect();
    format!("({})", statements.join(" "))
}

fn place(of: &Lvalue) -> String {
    match &of.kind {
        LvalueKind::Local(name) => format!("${name}"),
        LvalueKind::Global { name, keys } if keys.is_empty() => format!("@{name}"),
        LvalueKind::Global { name, keys } => list(&format!("@{name}[]"), keys),
    }
}

fn list(name: &str, of: &[Expression]) -> String {
    let mut out = format!("({name}");
    for one in of {
        out += &format!(" {}", expression(one));
    }
    out + ")"
}

fn statement(of: &Statement) -> String {
    match &of.kind {
        StatementKind::Assign {
            place: target,
            operator,
            value,
        } => {
            let operator = operator.map_or("", operator_text);
            format!("({operator}= {} {})", place(target), expression(value))
        }
        StatementKind::Aggregate {
            place: target,
            aggregation,
            value,
            range,
        } => {
            let name = names::aggregation_name(*aggregation).trim_end_matches("()");
            let mut out = format!("({name} {}", place(target));
            if let Some(value) = value {
                out += &format!(" {}", expression(value));
            }
            if let Aggregation::TimeSeries(kind) = aggregation {
                out += &format!(" {} {} {:?}", kind.interval, kind.intervals, kind.part);
            }
            if let Aggregation::LinearHistogram { min, max, step } = aggregation {
                out += &match range.is_empty() {
                    true => format!(" {min} {max} {step}"),
                    false => format!(" {}", list("range", range)),
                };
            }
            out + ")"
        }
        StatementKind::Expression(value) => expression(value),
        StatementKind::Declare { variable } => format!("(let ${variable})"),
        StatementKind::If {
            condition,
            then,
            otherwise,
        } => {
            let mut out = format!("(if {} {}", expression(condition), block(then));
            if !otherwise.statements.is_empty() {
                out += &format!(" {}", block(otherwise));
            }
            out + ")"
        }
        StatementKind::While { condition, body } => {
            format!("(while {} {})", expression(condition), block(body))
        }
        StatementKind::Repeat { times, body } => {
            format!("(repeat {} {})", expression(times), block(body))
        }
        StatementKind::ForMap {
            variable,
            map,
            body,
        } => format!("(for ${variable} @{map} {})", block(body)),
        StatementKind::ForRange {
            variable,
            first,
            end,
            body,
        } => format!(
            "(for ${variable} {} {} {})",
            expression(first),
            expression(end),
            block(body)
        ),
        StatementKind::Break => "(break)".to_owned(),
        StatementKind::Continue => "(continue)".to_owned(),
        StatementKind::Return(None) => "(return)".to_owned(),
        StatementKind::Return(Some(value)) => format!("(return {})", expression(value)),
    }
}

/// Returns the text of an expression.
pub fn expression(of: &Expression) -> String {
    match &of.kind {
        ExpressionKind::Number(number) => number.to_string(),
        ExpressionKind::Unsigned(number) => format!("{number}u"),
        ExpressionKind::Text(text) => format!("\"{}\"", text.escape_ascii()),
        ExpressionKind::Builtin(builtin) => names::builtin_name(*builtin).to_owned(),
        ExpressionKind::Argument(number) => format!("${number}"),
        ExpressionKind::ArgumentCount => "$#".to_owned(),
        ExpressionKind::Boolean(truth) => truth.to_string(),
        ExpressionKind::Enumerator { number, .. } => number.to_string(),
        ExpressionKind::Constant(name) => name.clone(),
        ExpressionKind::Lvalue(of) => place(of),
        ExpressionKind::Unary(operator, of) => {
            let text = match operator {
                UnaryOperator::Negate => "-",
                UnaryOperator::Not => "!",
                UnaryOperator::Complement => "~",
                UnaryOperator::Dereference => "*",
                UnaryOperator::Address => "&",
            };
            format!("({text} {})", expression(of))
        }
        ExpressionKind::Binary(operator, left, right) => format!(
            "({} {} {})",
            operator_text(*operator),
            expression(left),
            expression(right)
        ),
        ExpressionKind::Conditional {
            condition,
            then,
            otherwise,
        } => format!(
            "(? {}{} {})",
            expression(condition),
            then.iter()
                .map(|then| format!(" {}", expression(then)))
                .collect::<String>(),
            expression(otherwise)
        ),
        ExpressionKind::Step {
            place: target,
            by,
            postfix,
        } => {
            let sign = if *by > 0 { "++" } else { "--" };
            if *postfix {
                format!("({} {sign})", place(target))
            } else {
                format!("({sign} {})", place(target))
            }
        }
        ExpressionKind::Call(call) => {
            let name = names::signature_of(call.function).map_or("?", |known| known.name);
            list(name, &call.arguments)
        }
        ExpressionKind::Member {
            of, name, arrow, ..
        } => {
            let sign = if *arrow { "->" } else { "." };
            format!("({sign} {} {name})", expression(of))
        }
        ExpressionKind::Item { of, index } => format!("(. {} {index})", expression(of)),
        ExpressionKind::Index { of, index } => {
            format!("([] {} {})", expression(of), expression(index))
        }
        ExpressionKind::Cast { to, of } => {
            format!("(cast {} {})", type_name(to), expression(of))
        }
        ExpressionKind::SizeOfType(of) => format!("(sizeof {})", type_name(of)),
        ExpressionKind::SizeOfValue(of) => format!("(sizeof {})", expression(of)),
        ExpressionKind::TypeInfo(of) => format!("(typeinfo {})", type_name(of)),
        ExpressionKind::OffsetOf { of, members } => {
            format!("(offsetof {} {})", type_name(of), members.join("."))
        }
        ExpressionKind::Tuple(items) => list("tuple", items),
        ExpressionKind::Named { name, arguments } => {
            list(name, arguments.as_deref().unwrap_or_default())
        }
        ExpressionKind::Block(of) => {
            let value = of.value.as_ref().map_or(String::new(), expression);
            let name = if of.is_function { "body" } else { "block" };
            format!("({name} {} {value})", block(&of.block))
        }
        ExpressionKind::Record(members) => {
            let members = members
                .iter()
                .map(|(name, value)| format!(" ({name} {})", expression(value)));
            format!("(record{})", members.collect::<String>())
        }
        ExpressionKind::Translate { to, of } => {
            format!("(xlate {} {})", type_name(to), expression(of))
        }
    }
}

fn operator_text(operator: BinaryOperator) -> &'static str {
    names::BINARY_OPERATORS
        .iter()
        .find(|(_, known, _)| *known == operator)
        .map_or("?", |(text, ..)| text)
}
