//! The fenced blocks and the code within the sentences of a page in Markdown.

/// The mark before and behind a block.
const FENCE: &str = "```";

/// A fenced block.
#[derive(Debug, Default)]
pub struct Block {
    /// The number of its first line, from 1. The fence is the line before.
    pub line: usize,
    /// The first word behind the fence; may be empty.
    pub language: String,
    /// The lines between the fences.
    pub text: String,
}

/// A page.
#[derive(Debug, Default)]
pub struct Page {
    /// Its fenced blocks.
    pub blocks: Vec<Block>,
    /// All other lines, with an empty one for each of a block.
    prose: String,
}

impl Page {
    /// Splits a page's text.
    pub fn read(text: &str) -> Self {
        let mut page = Self::default();
        let mut open: Option<Block> = None;
        for (index, line) in text.lines().enumerate() {
            let fence = line.trim_start().strip_prefix(FENCE);
            match (&mut open, fence) {
                (Some(_), Some(_)) => page.blocks.extend(open.take()),
                (Some(block), None) => {
                    block.text.push_str(line);
                    block.text.push('\n');
                }
                (None, Some(language)) => {
                    open = Some(Block {
                        line: index + 2,
                        language: language.split(',').next().unwrap_or_default().to_owned(),
                        text: String::new(),
                    });
                }
                (None, None) => page.prose.push_str(line),
            }
            page.prose.push('\n');
        }
        page.blocks.extend(open);
        page
    }

    /// Returns the code between backticks in sentences and tables, with the numbers of its lines. A
    /// span may be wrapped, but it does not leave its paragraph.
    pub fn spans(&self) -> Vec<(usize, String)> {
        let mut spans = Vec::new();
        let mut line = 1;
        for paragraph in self.prose.split("\n\n") {
            for (index, piece) in paragraph.split('`').enumerate() {
                if index % 2 == 1 {
                    // A table writes | with a backslash.
                    spans.push((line, piece.replace("\\|", "|").replace('\n', " ")));
                }
                line += piece.matches('\n').count();
            }
            line += 2;
        }
        spans
    }
}

impl Block {
    /// Returns the commands that are typed in a terminal's text: an empty line stands for each line
    /// of output.
    pub fn typed(&self) -> String {
        let mut is_typed = false;
        let mut typed = String::new();
        for line in self.text.lines() {
            let command = ["$ ", "# "].iter().find_map(|mark| line.strip_prefix(mark));
            let more = is_typed.then(|| line.strip_prefix("> ").unwrap_or(line));
            let command = command.or(more).unwrap_or_default();
            is_typed = command.ends_with('\\');
            typed.push_str(command);
            typed.push('\n');
        }
        typed
    }

    /// Returns the commands of a workflow's steps: the texts of `run`, with the numbers of their
    /// first lines.
    pub fn steps(&self) -> Vec<(usize, String)> {
        let lines: Vec<&str> = self.text.lines().collect();
        let mut steps = Vec::new();
        for (index, line) in lines.iter().enumerate() {
            let key = line.trim_start().trim_start_matches("- ");
            let Some(value) = key.strip_prefix("run:").map(str::trim) else {
                continue;
            };
            let at = self.line + index;
            let below = lines.iter().skip(index + 1);
            let deep = line.len() - key.len();
            let body = below.take_while(|one| {
                one.trim().is_empty() || one.len() - one.trim_start().len() > deep
            });
            let body: Vec<&str> = body.copied().collect();
            steps.push(match value {
                "|" => (at + 1, body.join("\n")),
                ">" => (at + 1, body.join(" ")),
                command => (at, command.to_owned()),
            });
        }
        steps
    }
}
