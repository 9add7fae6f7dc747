//! Text into tokens. The two dialects cut text so differently that each has its own lexer: [`normal`] and [`strict`].

pub mod literal;
pub mod normal;
pub mod strict;
