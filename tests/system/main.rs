//! The daemons and their commands as users run them: real processes on the loopback.
//!
//! `access.rs` access lists · `allocations.rs` what requests allocate · `daemons.rs` attach to
//! detach, restarts, idle CPU · `commands.rs` what programs read of the commands · `apply.rs`
//! sessions from a file · `admin.rs` and `online.rs` the operator's work under load · `settings.rs`
//! flags, files and documents agree · `discover.rs` lists of exports · `documents.rs` manual pages,
//! completions, versions · `exports.rs` exports that come and go · `faults.rs` faults under load ·
//! `identity.rs` other servers under one name · `logs.rs` the logs of both daemons · `memory.rs`
//! the limit of chunk memory · `metrics.rs` scrapes · `nbd_tls.rs` NBD clients over TLS ·
//! `network.rs` cables and addresses that come and go · `privileges.rs` a server that goes on as
//! another user · `resize.rs` exports that grow · `server_log.rs` what the server logs ·
//! `service.rs` what the service manager hears · `signals.rs` what a signal does · `slow.rs` a disk
//! that does not answer · `times.rs` network or disk · `tls.rs` tls:// with certificates and keys ·
//! `top.rs` the live view · `units.rs` the units of systemd · `volumes.rs` several volumes in a
//! session. One file alone: `cargo test -p rtrs-tests --test system admin::`.
#![forbid(unsafe_code)]

mod access;
mod admin;
mod allocations;
mod apply;
mod commands;
mod daemons;
mod discover;
mod documents;
mod exports;
mod faults;
mod identity;
mod logs;
mod memory;
mod metrics;
mod migration;
mod nbd_tls;
mod network;
mod online;
mod privileges;
mod resize;
mod server_log;
mod service;
mod settings;
mod signals;
mod slow;
mod times;
mod tls;
mod top;
mod units;
mod volumes;
