//! Tests of the daemons and their commands as users run them: real processes on loopback.
//!
//! `access.rs` access lists · `activation.rs` sockets of systemd · `allocations.rs` allocations of
//! requests · `copy.rs` copies and comparisons · `daemons.rs` attach to detach, restarts, idle CPU
//! · `commands.rs` output of commands for programs · `apply.rs` sessions from a file ·
//! `attach_paths.rs` paths that do not work · `blocks.rs` command lines of documents · `admin.rs`
//! and `online.rs` the operator's work under load · `settings.rs` agreement of flags, files and
//! documents · `discover.rs` lists of exports · `documents.rs` manual pages, completions, versions
//! · `exporter.rs` scrapes of all sessions of a host · `exports.rs` changes to exports ·
//! `linux_guest.rs` a Linux guest on a volume · `failed_io.rs` IO that fails · `faults.rs` faults
//! under load · `identity.rs` other servers under one name · `instructions.rs` the cost of hot
//! paths · `limits.rs` rate limits of exports · `logs.rs` the logs of both daemons ·
//! `lost_writes.rs` writes that a server loses between two processes of a volume · `memory.rs` the
//! limit of chunk memory · `metrics.rs` scrapes · `nbd_tls.rs` NBD clients over TLS · `network.rs`
//! changes of cables and addresses · `privileges.rs` a server that switches to another user ·
//! `proxmox.rs` the storage plugin of Proxmox VE · `resize.rs` exports that grow · `save.rs` the
//! file of `save` · `saved.rs` changes that outlast a restart · `server_log.rs` the server's log ·
//! `service.rs` messages to the service manager · `signals.rs` effects of signals · `slow.rs` a
//! disk that does not answer · `snippets.rs` files in documents · `times.rs` network or disk ·
//! `tls.rs` tls:// with certificates and keys · `top.rs` the live view · `units.rs` the units of
//! systemd · `volumes.rs` several volumes in a session · `vhost_user.rs` virtual machines. One file
//! alone: `cargo test -p rtrs-tests --test system admin::`.
//!
//! `checks.rs` configuration tests · `descriptors.rs` processes without free descriptors ·
//! `image_locks.rs` qemu's locks of images · `last_copy.rs` deleted files that the server holds.
#![forbid(unsafe_code)]

mod access;
mod activation;
mod admin;
mod allocations;
mod apply;
mod attach_paths;
mod blocks;
mod checks;
mod commands;
mod copy;
mod daemons;
mod descriptors;
mod discover;
mod displaced;
mod documents;
mod exporter;
mod exports;
mod failed_io;
mod faults;
mod identity;
mod image_locks;
mod instructions;
mod last_copy;
mod limits;
mod linux_guest;
mod logs;
mod lost_writes;
mod memory;
mod metrics;
mod migration;
mod names;
mod nbd_tls;
mod network;
mod online;
mod privileges;
mod proxmox;
mod resize;
mod save;
mod saved;
mod server_log;
mod service;
mod settings;
mod signals;
mod slow;
mod snippets;
mod times;
mod tls;
mod top;
mod units;
mod vhost_migration;
mod vhost_user;
mod volumes;
