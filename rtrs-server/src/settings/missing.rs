//! Reaction of a start to exports that cannot be opened.

use rtrs_core::settings::choices;

choices! {
    /// Reaction of a start to exports that cannot be opened.
    #[derive(Default)]
    pub enum OnMissing as "on-missing" {
        /// Serve the other exports, and try again to open the failed ones.
        #[default]
        Wait = "wait",
        /// Do not start.
        Refuse = "refuse",
    }
}
