//! The view on a terminal: a table that keys order, filter and descend into.

use std::time::Duration;

use ratatui::Frame as Drawing;
use ratatui::crossterm::event::{
    self, Event as Input, KeyCode, KeyEvent, KeyEventKind, KeyModifiers,
};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table, TableState};

use super::feed::{Event, Feed};
use super::table::{Frame, Order, Row, rows, shown};
use super::views::{self, View};
use crate::args::TopKind as Kind;
use crate::client::control::ask_within;
use crate::protocol::control::{Answer, Command};
use crate::protocol::cost::Cost;
use crate::registry::Running;
use crate::report::{Failure, printable};

/// The time between looks at the keyboard and at the script.
const STEP: Duration = Duration::from_millis(100);
/// The longest wait for the machine's cost, which the title has.
const COST_PATIENCE: Duration = Duration::from_millis(100);
/// The keys, on the last line.
const HELP: &str = "p processes  c calls  f files  n connections  < > column  r reverse  / filter  Enter stacks  space pause  q quit";

/// The request that a key makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// Nothing that concerns the script.
    Nothing,
    /// The end.
    Quit,
    /// Another view.
    View(Box<View>),
    /// The view before the stacks of a process.
    Back,
}

/// The state of the screen.
pub struct Screen {
    view: View,
    frame: Frame,
    order: Order,
    /// The selected row, from 0.
    selected: usize,
    /// Whether the text of the filter is being typed.
    types_filter: bool,
    is_paused: bool,
    has_ticked: bool,
    /// The cost of all traces of the machine, at the last tick.
    cost: Option<Cost>,
    /// The cost from the tick before to the last one.
    recent_cost: Option<Cost>,
}

impl Screen {
    /// Makes the screen of a view, which has no rows yet.
    pub fn new(view: View) -> Self {
        Self {
            view,
            frame: Frame::new(),
            order: Order::default(),
            selected: 0,
            types_filter: false,
            is_paused: false,
            has_ticked: false,
            cost: None,
            recent_cost: None,
        }
    }

    /// Takes the cost of all traces of the machine so far.
    pub fn costs(&mut self, cost: Option<Cost>) {
        let both = cost.zip(self.cost);
        self.recent_cost = both.map(|(now, before)| now.since(&before));
        self.cost = cost;
    }

    /// Takes the maps of a tick.
    pub fn tick(&mut self, frame: Frame) {
        if !self.is_paused {
            self.frame = frame;
            self.has_ticked = true;
        }
    }

    fn rows(&self) -> Vec<Row> {
        rows(&self.view, &self.frame, &self.order)
    }

    /// Carries out a key.
    pub fn key(&mut self, key: KeyEvent) -> Asked {
        if key.kind == KeyEventKind::Release {
            return Asked::Nothing;
        }
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && key.code == KeyCode::Char('c') {
            return Asked::Quit;
        }
        if self.types_filter {
            match key.code {
                KeyCode::Enter => self.types_filter = false,
                KeyCode::Esc => {
                    self.types_filter = false;
                    self.order.filter.clear();
                }
                KeyCode::Backspace => {
                    self.order.filter.pop();
                }
                KeyCode::Char(letter) => self.order.filter.push(letter),
                _ => {}
            }
            return Asked::Nothing;
        }
        let view = |kind| Asked::View(Box::new(View::of(kind)));
        let last = self.view.columns.len().saturating_sub(1);
        match key.code {
            KeyCode::Char('q') => return Asked::Quit,
            KeyCode::Esc => return Asked::Back,
            KeyCode::Char('p') => return view(Kind::Processes),
            KeyCode::Char('c') => return view(Kind::Calls),
            KeyCode::Char('f') => return view(Kind::Files),
            KeyCode::Char('n') => return view(Kind::Connections),
            KeyCode::Char('<') | KeyCode::Left => {
                self.order.column = self.order.column.saturating_sub(1);
            }
            KeyCode::Char('>') | KeyCode::Right => {
                self.order.column = (self.order.column + 1).min(last);
            }
            KeyCode::Char('r') => self.order.ascending = !self.order.ascending,
            KeyCode::Char('/') => {
                self.order.filter.clear();
                self.types_filter = true;
            }
            KeyCode::Char(' ') => self.is_paused = !self.is_paused,
            KeyCode::Up => self.selected = self.selected.saturating_sub(1),
            KeyCode::Down => self.selected += 1,
            KeyCode::Enter => {
                let rows = self.rows();
                let pid = rows.get(self.selected).and_then(|row| row.pid(&self.view));
                if let Some(pid) = pid {
                    return Asked::View(Box::new(views::stacks_of(pid)));
                }
            }
            _ => {}
        }
        Asked::Nothing
    }

    /// Draws all of it.
    pub fn draw(&mut self, on: &mut Drawing<'_>) {
        let [head, body, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Fill(1),
            Constraint::Length(1),
        ])
        .areas(on.area());
        let rows = self.rows();
        self.selected = self.selected.min(rows.len().saturating_sub(1));
        let state = match (self.is_paused, self.has_ticked) {
            (true, _) => " (paused)",
            (_, false) => " (waiting for the first second)",
            _ => "",
        };
        let filter = match (self.types_filter, self.order.filter.as_str()) {
            (true, filter) => format!("  /{filter}_"),
            (_, "") => String::new(),
            (_, filter) => format!("  /{filter}"),
        };
        let cost = self.recent_cost.map_or_else(String::new, |cost| {
            format!("  tracing costs {:.1} %", cost.percent())
        });
        let title = format!("exotrace: {}{state}{filter}{cost}", self.view.title);
        let bold = Style::new().add_modifier(Modifier::BOLD);
        on.render_widget(Paragraph::new(Line::styled(title, bold)), head);
        let is_stacks = self.view.keys == ["STACK"];
        match is_stacks {
            true => on.render_widget(Paragraph::new(stacks(&self.view, &rows)), body),
            false => {
                let mut state = TableState::new().with_selected(Some(self.selected));
                on.render_stateful_widget(self.table(&rows), body, &mut state);
            }
        }
        on.render_widget(Paragraph::new(HELP), foot);
    }

    fn table(&self, rows: &[Row]) -> Table<'static> {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let mut titles: Vec<String> = self.view.keys.iter().map(|key| (*key).to_owned()).collect();
        titles.extend(self.view.columns.iter().enumerate().map(|(at, column)| {
            let mark = match (at == self.order.column, self.order.ascending) {
                (true, true) => " ^",
                (true, false) => " v",
                _ => "",
            };
            format!("{}{mark}", column.title)
        }));
        let widths: Vec<Constraint> = (0..titles.len())
            .map(|at| {
                let cells = rows.iter().filter_map(|row| row.key.get(at));
                let longest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
                let title = titles.get(at).map_or(0, |title| title.chars().count());
                Constraint::Length(u16::try_from(longest.max(title).clamp(7, 40)).unwrap_or(40))
            })
            .collect();
        let lines = rows.iter().map(|row| {
            let keys = row.key.iter().map(|part| Cell::new(printable(part)));
            let numbers = row.numbers.iter().zip(&self.view.columns);
            let numbers = numbers.map(|(number, column)| {
                Cell::new(Line::from(shown(*number, &column.unit)).right_aligned())
            });
            TableRow::new(keys.chain(numbers).collect::<Vec<_>>())
        });
        Table::new(lines.collect::<Vec<_>>(), widths)
            .header(TableRow::new(titles).style(bold))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
    }
}

/// Returns the lines of stacks, each under its share.
fn stacks(view: &View, rows: &[Row]) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    for row in rows {
        let share = row.numbers.iter().zip(&view.columns).next();
        let share = share.map_or(String::new(), |(number, column)| {
            format!("{} % of a CPU", shown(*number, &column.unit))
        });
        lines.push(Line::styled(
            share,
            Style::new().add_modifier(Modifier::BOLD),
        ));
        let frames = row.key.iter().flat_map(|key| key.lines());
        let frames = frames.filter(|frame| !frame.trim().trim_matches(',').is_empty());
        lines.extend(frames.map(|frame| Line::from(printable(frame))));
    }
    lines
}

/// Shows a view on the terminal until somebody quits or the script ends.
///
/// # Errors
/// If the machine, its script or the terminal fails.
pub fn show(machine: &Running, view: View) -> Result<(), Failure> {
    let mut terminal = ratatui::try_init()?;
    let shown = follow(machine, view, &mut terminal);
    ratatui::try_restore()?;
    shown
}

fn follow(
    machine: &Running,
    view: View,
    terminal: &mut ratatui::DefaultTerminal,
) -> Result<(), Failure> {
    let (mut before, mut feed) = (None, Feed::start(machine, &view)?);
    let mut screen = Screen::new(view);
    loop {
        terminal.draw(|on| screen.draw(on))?;
        match feed.next(STEP) {
            Event::Tick(frame) => {
                screen.tick(frame);
                screen.costs(cost_of(machine));
            }
            Event::None => {}
            Event::End(ended) => return ended,
        }
        while event::poll(Duration::ZERO)? {
            let Input::Key(key) = event::read()? else {
                continue;
            };
            let view = match screen.key(key) {
                Asked::Nothing => continue,
                Asked::Quit => return Ok(()),
                Asked::Back => match before.take() {
                    Some(view) => view,
                    None => continue,
                },
                Asked::View(view) => {
                    before = Some(screen.view.clone());
                    *view
                }
            };
            feed = Feed::start(machine, &view)?;
            screen = Screen::new(view);
        }
    }
}

/// Returns the cost of all traces of a machine; `None` if it does not say it at once.
fn cost_of(machine: &Running) -> Option<Cost> {
    match ask_within(machine, &Command::Stat { hash: false }, COST_PATIENCE) {
        Ok(Answer::Stat(stat)) => stat.cost,
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::table::Collector;
    use super::*;

    fn press(screen: &mut Screen, keys: &[KeyCode]) -> Asked {
        let mut asked = Asked::Nothing;
        for key in keys {
            asked = screen.key(KeyEvent::new(*key, KeyModifiers::NONE));
        }
        asked
    }

    fn drawn(screen: &mut Screen) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(60, 6)).unwrap();
        terminal.draw(|on| screen.draw(on)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let cells = buffer.content.chunks(60);
        let lines = cells.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>());
        lines.map(|line| line.trim_end().to_owned()).collect()
    }

    fn ticked() -> Screen {
        let mut screen = Screen::new(View::of(Kind::Processes));
        let mut collector = Collector::default();
        for line in [
            r#"{"type": "map", "data": {"@samples": {"7,sh": 99, "9,cat": 33}}}"#,
            r#"{"type": "map", "data": {"@calls": {"7,sh": 5, "9,cat": 500}}}"#,
            r#"{"type": "value", "data": "top"}"#,
        ] {
            if let Some(frame) = collector.take(line) {
                screen.tick(frame);
            }
        }
        screen
    }

    #[test]
    fn keys_order_filter_and_descend() {
        let mut screen = ticked();
        let lines = drawn(&mut screen);
        assert_eq!(lines[0], "exotrace: processes");
        assert_eq!(lines[1], "PID     COMM    CPU % v CALLS/s FAULTS/s");
        assert_eq!(lines[2], "7       sh        100.0       5        0");
        press(&mut screen, &[KeyCode::Right]);
        assert!(drawn(&mut screen)[2].starts_with("9       cat"));
        press(&mut screen, &[KeyCode::Char('r')]);
        assert!(drawn(&mut screen)[2].starts_with("7       sh"));
        press(
            &mut screen,
            &[
                KeyCode::Char('/'),
                KeyCode::Char('c'),
                KeyCode::Char('a'),
                KeyCode::Enter,
            ],
        );
        let lines = drawn(&mut screen);
        assert_eq!(lines[0], "exotrace: processes  /ca");
        assert!(lines[2].starts_with("9       cat") && lines[3].is_empty());
        let Asked::View(stacks) = press(&mut screen, &[KeyCode::Enter]) else {
            panic!("no stacks")
        };
        assert_eq!(stacks.title, "stacks of process 9");
        assert_eq!(press(&mut screen, &[KeyCode::Char('q')]), Asked::Quit);
    }

    #[test]
    fn the_title_has_the_cost_of_the_last_second() {
        let mut screen = ticked();
        let cost = |busiest_ns, passed_ns| {
            Some(Cost {
                busiest_ns,
                passed_ns,
                ..Cost::default()
            })
        };
        for (cost, shown) in [
            (cost(500, 1_000), ""),
            (cost(525, 2_000), "  tracing costs 2.5 %"),
            (None, ""),
        ] {
            screen.costs(cost);
            assert_eq!(drawn(&mut screen)[0], format!("exotrace: processes{shown}"));
        }
    }

    #[test]
    fn a_paused_screen_keeps_its_rows() {
        let mut screen = ticked();
        press(&mut screen, &[KeyCode::Char(' ')]);
        screen.tick(Frame::new());
        let lines = drawn(&mut screen);
        assert_eq!(lines[0], "exotrace: processes (paused)");
        assert!(lines[2].starts_with("7       sh"));
    }

    #[test]
    fn stacks_are_shown_under_their_share() {
        let mut screen = Screen::new(views::stacks_of(7));
        let frame = [("\n    vfs_read+10\n,\n    main+4\n".to_owned(), 99.0)];
        screen.tick(Frame::from([("stacks".to_owned(), frame.into())]));
        let lines = drawn(&mut screen);
        assert_eq!(
            lines[1..4],
            ["100.0 % of a CPU", "    vfs_read+10", "    main+4"]
        );
    }
}
