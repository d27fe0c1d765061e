//! View on a terminal: full-screen, and responding to keys.
//!
//! While the view is shown, the terminal neither echoes nor waits for line ends. [`restore`] undoes
//! this in all cases: at the end, on errors, on panics, and on signals that terminate or stop the
//! process. Only SIGKILL leaves the terminal unrestored; `reset` helps then.

use std::io::{self, Read, Write};
use std::sync::mpsc::{self, Sender};

use parking_lot::Mutex;
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use super::rates::{Sample, View};
use super::table::Layout;
use super::{End, IntervalArgs, Source, sample, unix_time, wait_until_end};
use crate::settings::{CommandError, ErrorClass, printable};
use crate::time::Duration;

/// Switches to the alternate screen and hides the cursor.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J";
/// Shows the cursor and switches back.
const LEAVE: &[u8] = b"\x1b[?25h\x1b[?1049l";
/// Moves the cursor to the top left corner.
const HOME: &str = "\x1b[H";
/// Clears the rest of the line.
const CLEAR_LINE: &str = "\x1b[K";
/// Clears everything below.
const CLEAR_REST: &str = "\x1b[J";
/// Size used if the terminal's size is unknown.
const SIZE_DEFAULT: (usize, usize) = (24, 80);
/// Maximum time that a panic waits for a thread that is drawing.
const DRAWING_MAX: Duration = Duration::from_millis(500);

/// Original settings of the terminal, while they are replaced. Locked while drawing.
static ORIGINAL: Mutex<Option<Termios>> = Mutex::new(None);

/// Event that changes the view.
enum Event<K: ErrorClass> {
    Sample(Result<Sample, CommandError<K>>),
    Keys(Vec<u8>),
    Redraw,
    /// No more keys will arrive.
    Closed,
}

/// Switches the terminal to full-screen mode.
fn enter() -> io::Result<()> {
    let mut original = ORIGINAL.lock();
    if original.is_none() {
        let now = tcgetattr(io::stdin())?;
        let mut raw = now.clone();
        // Keys that send signals still work.
        raw.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        raw.special_codes[SpecialCodeIndex::VMIN] = 1;
        raw.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        *original = Some(now);
    }
    let mut out = io::stdout();
    out.write_all(ENTER).and_then(|()| out.flush())
}

/// Restores the terminal, which may already be closed.
fn restore(original: &mut Option<Termios>) {
    if let Some(original) = original.take() {
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &original);
        let mut out = io::stdout();
        let _ = out.write_all(LEAVE).and_then(|()| out.flush());
    }
}

/// Guard of the terminal while it is in full-screen mode.
struct Screen;

impl Screen {
    fn enter() -> io::Result<Self> {
        let former = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if let Some(mut original) = ORIGINAL.try_lock_for(DRAWING_MAX) {
                restore(&mut original);
            }
            former(info);
        }));
        let screen = Self;
        enter()?;
        Ok(screen)
    }

    /// Draws as many lines and columns as fit.
    fn draw(&self, shown: &mut Shown) -> io::Result<()> {
        let (rows, columns) = match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_row > 0 && size.ws_col > 0 => {
                (usize::from(size.ws_row), usize::from(size.ws_col))
            }
            _ => SIZE_DEFAULT,
        };
        shown.layout.width = columns;
        let frame = frame(&shown.lines(), rows, columns);
        let original = ORIGINAL.lock();
        if original.is_none() {
            // A signal handler has restored the terminal.
            return Ok(());
        }
        let mut out = io::stdout();
        out.write_all(frame.as_bytes()).and_then(|()| out.flush())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore(&mut ORIGINAL.lock());
    }
}

/// Returns the output that draws these lines on a screen of that size.
fn frame(lines: &[String], rows: usize, columns: usize) -> String {
    let cut = |line: &String| line.chars().take(columns).collect::<String>() + CLEAR_LINE;
    let shown: Vec<String> = lines.iter().take(rows).map(cut).collect();
    format!("{HOME}{}{CLEAR_REST}", shown.join("\r\n"))
}

/// Terminates, stops and continues the process on signals, keeping the terminal in the right mode.
fn watch_signals<K: ErrorClass>(events: Sender<Event<K>>) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCONT, SIGWINCH])?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            match signal {
                SIGWINCH => {}
                // If the terminal is closed, reading from it fails.
                SIGCONT => drop(enter()),
                _ => {
                    let mut original = ORIGINAL.lock();
                    restore(&mut original);
                    // Returns if the signal stopped the process and it was continued.
                    let _ = emulate_default_handler(signal);
                }
            }
            if events.send(Event::Redraw).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// Passes on keys as they are typed.
fn watch_keys<K: ErrorClass>(events: Sender<Event<K>>) -> io::Result<()> {
    std::thread::Builder::new().name("keys".into()).spawn(move || {
        let mut keys = [0; 64];
        loop {
            let event = match io::stdin().read(&mut keys) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Ok(0) | Err(_) => Event::Closed,
                Ok(count) => Event::Keys(keys[..count].to_vec()),
            };
            let is_closed = matches!(event, Event::Closed);
            if events.send(event).is_err() || is_closed {
                return;
            }
        }
    })?;
    Ok(())
}

/// Takes a sample at the end of each interval. A hanging daemon does not delay keys.
fn watch_source<K: ErrorClass>(
    events: Sender<Event<K>>,
    first: &Sample,
    interval: Duration,
    mut source: impl Source<K> + Send + 'static,
) -> io::Result<()> {
    let mut end = first.at;
    std::thread::Builder::new().name("samples".into()).spawn(move || {
        loop {
            end = wait_until_end(end, interval);
            if events.send(Event::Sample(sample(&mut source))).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// State of the screen.
struct Shown {
    title: String,
    interval: String,
    layout: Layout,
    with_help: bool,
    view: Option<View>,
    error: Option<String>,
}

impl Shown {
    fn lines(&self) -> Vec<String> {
        let by = self.layout.sorted_by();
        let mut lines = vec![
            format!("{}: every {}, sorted by {by}; h help, q quit", self.title, self.interval),
            self.error.clone().unwrap_or_default(),
        ];
        match &self.view {
            _ if self.with_help => lines.extend(Layout::help()),
            Some(view) => lines.extend(self.layout.lines(view)),
            None => lines.push("The first interval is not over yet.".to_owned()),
        }
        lines
    }

    /// Handles keys. Returns false if they end the command.
    fn handle_keys(&mut self, keys: &[u8]) -> bool {
        // Arrow keys and other special keys send several bytes, which must not be mistaken for
        // other keys.
        if keys.first() == Some(&0x1b) {
            return true;
        }
        for key in keys {
            match char::from(*key) {
                'q' => return false,
                'p' => self.layout.with_paths = !self.layout.with_paths,
                't' => self.layout.times_first = !self.layout.times_first,
                'h' | '?' => self.with_help = !self.with_help,
                key => {
                    self.layout.sort_by(key);
                }
            }
        }
        true
    }
}

pub(super) fn run<K: ErrorClass>(
    title: &str,
    args: &IntervalArgs,
    first: Sample,
    source: impl Source<K> + Send + 'static,
) -> Result<(), End<K>> {
    let (events, received) = mpsc::channel();
    let screen = Screen::enter()?;
    watch_signals(events.clone())?;
    watch_keys(events.clone())?;
    watch_source(events, &first, args.interval.get(), source)?;
    let mut shown = Shown {
        title: title.to_owned(),
        interval: args.interval.to_string(),
        layout: Layout::default(),
        with_help: false,
        view: None,
        error: None,
    };
    let (mut before, mut left) = (first, args.count);
    screen.draw(&mut shown)?;
    for event in received {
        match event {
            Event::Sample(Ok(now)) => {
                shown.view = Some(View::between(&before, &now, unix_time()));
                shown.error = None;
                before = now;
            }
            Event::Sample(Err(error)) => {
                shown.error = Some(printable(&error.chain().to_string()));
                if left == Some(1) {
                    return Err(End::Failed(error));
                }
            }
            Event::Keys(keys) => {
                if !shown.handle_keys(&keys) {
                    break;
                }
                screen.draw(&mut shown)?;
                continue;
            }
            Event::Redraw => {
                screen.draw(&mut shown)?;
                continue;
            }
            Event::Closed => break,
        }
        screen.draw(&mut shown)?;
        left = left.map(|left| left - 1);
        if left == Some(0) {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown() -> Shown {
        Shown {
            title: "rtrs-client top".into(),
            interval: "1s".into(),
            layout: Layout::default(),
            with_help: false,
            view: None,
            error: Some("no answer".into()),
        }
    }

    #[test]
    fn keys_change_the_view() {
        let mut shown = shown();
        let title = "rtrs-client top: every 1s, sorted by NAME; h help, q quit";
        assert_eq!(shown.lines()[..2], [title, "no answer"]);
        assert!(shown.handle_keys(b"i"));
        assert!(shown.lines()[0].contains("sorted by IO/s;"));
        assert!(shown.handle_keys(b"\x1b[C") && shown.handle_keys(b"xz\xff"), "these mean nothing");
        assert!(shown.lines()[0].contains("sorted by IO/s;"));
        assert!(shown.handle_keys(b"p") && !shown.layout.with_paths);
        assert!(shown.handle_keys(b"h") && shown.lines().iter().any(|line| line == "Sort by:"));
        assert!(shown.handle_keys(b"?pl") && !shown.with_help && shown.layout.with_paths);
        assert!(shown.lines()[0].contains("sorted by p99 us;"));
        assert!(shown.handle_keys(b"t") && shown.layout.times_first);
        assert!(!shown.handle_keys(b"wq"));
    }

    #[test]
    fn a_frame_fits_the_screen() {
        let lines = ["äbcdef", "gh", "never"].map(str::to_owned);
        assert_eq!(frame(&lines, 2, 4), "\x1b[Häbcd\x1b[K\r\ngh\x1b[K\x1b[J");
    }
}
