//! Reaction at startup to exports that cannot be opened.

use rtrs_core::settings::choices;

choices! {
    /// Reaction at startup to exports that cannot be opened.
    #[derive(Default)]
    pub enum OnMissing as "on-missing" {
        /// [`OnMissing::Wait`] with a configuration file. Without one, do not start if nothing
        /// could be served: the command may have a typo.
        #[default]
        Auto = "auto",
        /// Serve the other exports, and try again to open the failed ones.
        Wait = "wait",
        /// Do not start.
        Refuse = "refuse",
    }
}
