//! Legal moves of a state machine, as data.
//!
//! A state type lists its moves once ([`Moves`]); every change of such a state goes through
//! [`step`], which panics on a move that is not in the list: that is a fault of ours, never of a
//! peer. [`table`] prints the list, so that a test can hold it against the documented one.

use std::fmt::{Debug, Write};

/// A state with a list of legal moves.
pub trait Moves: Copy + PartialEq + Debug + 'static {
    /// For each state, where it may go from there. A state without an entry is final.
    const MOVES: &'static [(Self, &'static [Self])];
}

/// True when the move is legal.
pub fn allowed<S: Moves>(from: S, to: S) -> bool {
    S::MOVES.iter().any(|(state, next)| *state == from && next.contains(&to))
}

/// Makes a move. Panics when it is not legal.
#[track_caller]
pub fn step<S: Moves>(state: &mut S, to: S) {
    assert!(allowed(*state, to), "illegal move from {state:?} to {to:?}");
    *state = to;
}

/// One line per state: `From: To, To`.
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
    fn moves_follow_the_list() {
        let mut door = Door::Open;
        step(&mut door, Door::Shut);
        step(&mut door, Door::Gone);
        assert!(!allowed(Door::Gone, Door::Open) && !allowed(Door::Open, Door::Gone));
        assert_eq!(table::<Door>(), "Open: Shut\nShut: Open, Gone\n");
    }

    #[test]
    #[should_panic(expected = "illegal move from Open to Gone")]
    fn an_illegal_move_panics() {
        step(&mut { Door::Open }, Door::Gone);
    }
}
