//! Legal transitions of a state machine, as data.
//!
//! A state type lists its transitions once ([`Moves`]); every change of such a state uses [`step`],
//! which panics on a transition that is not in the list: that is a bug in this program, never
//! caused by a peer. [`table`] prints the list, so that a test can compare it with the documented
//! one.

use std::fmt::{Debug, Write};

/// State with a list of legal transitions.
pub trait Moves: Copy + PartialEq + Debug + 'static {
    /// Legal successors of each state. A state without an entry is final.
    const MOVES: &'static [(Self, &'static [Self])];
}

/// Returns true if the transition is legal.
pub fn allowed<S: Moves>(from: S, to: S) -> bool {
    S::MOVES.iter().any(|(state, next)| *state == from && next.contains(&to))
}

/// Changes the state. Panics if the transition is illegal.
#[track_caller]
pub fn step<S: Moves>(state: &mut S, to: S) {
    assert!(allowed(*state, to), "illegal move from {state:?} to {to:?}");
    *state = to;
}

/// Formats the list as one line per state: `From: To, To`.
pub fn table<S: Moves>() -> String {
    let mut text = String::new();
    for (from, next) in S::MOVES {
        let names: Vec<String> = next.iter().map(|to| format!("{to:?}")).collect();
        let _ = writeln!(text, "{from:?}: {}", names.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Door {
        Open,
        Shut,
        Gone,
    }

    impl Moves for Door {
        const MOVES: &'static [(Self, &'static [Self])] =
            &[(Self::Open, &[Self::Shut]), (Self::Shut, &[Self::Open, Self::Gone])];
    }

    #[test]
    fn transitions_follow_the_table() {
        let mut door = Door::Open;
        step(&mut door, Door::Shut);
        step(&mut door, Door::Gone);
        assert!(!allowed(Door::Gone, Door::Open) && !allowed(Door::Open, Door::Gone));
        assert_eq!(table::<Door>(), "Open: Shut\nShut: Open, Gone\n");
    }

    #[test]
    #[should_panic(expected = "illegal move from Open to Gone")]
    fn an_illegal_transition_panics() {
        step(&mut { Door::Open }, Door::Gone);
    }
}
