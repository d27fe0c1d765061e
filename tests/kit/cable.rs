//! Two hosts on this machine, joined by cables that can be pulled: two network namespaces, each
//! held by a sleeping process, and veth pairs. Requires root; everything is removed when the handle
//! is dropped.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::proc::{Proc, bin, run};
use crate::requires::{is_root, requires, skip};
use crate::{COMMAND_TIME_MAX, wait_for};

/// Maximum lifetime, in seconds, of the processes that hold the namespaces.
const LIFE_TIME: &str = "900";

/// Simulated host: a network namespace, identified by a process in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Netns(u32);

impl Netns {
    /// Returns the ID of a process in the namespace.
    #[must_use]
    pub fn pid(self) -> u32 {
        self.0
    }

    /// Prepares a program of this project to run on this host or, without one, on the machine
    /// itself.
    pub(crate) fn program(netns: Option<Self>, name: &str) -> Command {
        let Some(Self(pid)) = netns else { return Command::new(bin(name)) };
        let mut command = Command::new("nsenter");
        command.args(["-t", &pid.to_string(), "-n", "--"]).arg(bin(name));
        command
    }
}

/// Veth pairs, each with a client end and a server end.
#[derive(Debug)]
pub struct Cable {
    ends: [Proc; 2],
}

impl Cable {
    /// Address of the server.
    pub const SERVER: &str = "10.99.0.2";
    /// Name of the client's end.
    pub const LINK: &str = "cable0";

    /// Lays one cable between two new hosts. If that is not possible here, prints the reason and
    /// returns `None`.
    ///
    /// # Panics
    /// Panics if it should be possible but fails.
    #[must_use]
    pub fn lay() -> Option<Self> {
        Self::lay_all(1)
    }

    /// Lays `count` cables between two new hosts; the first is the same as in [`Self::lay`].
    ///
    /// # Panics
    /// Panics if it should be possible but fails.
    #[must_use]
    pub fn lay_all(count: usize) -> Option<Self> {
        if !requires(&["ip", "nsenter", "unshare"]) {
            return None;
        }
        if !is_root() {
            skip("network namespaces need root");
            return None;
        }
        let tried = run("unshare", &["-n", "ip", "link", "add", "type", "veth"], COMMAND_TIME_MAX);
        if tried.code != Some(0) {
            skip(&format!("no network namespace with a veth pair: {}", tried.stderr.trim()));
            return None;
        }
        let cable = Self { ends: [Self::host(), Self::host()] };
        for number in 0..count {
            cable.lay_one(number);
        }
        Some(cable)
    }

    fn lay_one(&self, number: usize) {
        let [client, server] = self.hosts().map(|Netns(pid)| pid.to_string());
        let [ours, theirs] = Self::links(number);
        let pair = ["link", "add", &ours, "netns", &client, "type", "veth"];
        let peer = ["peer", "name", &theirs, "netns", &server];
        let _ = run("ip", &[&pair[..], &peer[..]].concat(), COMMAND_TIME_MAX).ok();
        // No IPv6 address may appear on its own while a test waits for other events.
        self.client(&["link", "set", &ours, "addrgenmode", "none"]);
        self.server(&["link", "set", &theirs, "addrgenmode", "none"]);
        self.client(&["addr", "add", &format!("10.99.{number}.1/24"), "dev", &ours]);
        let address = format!("{}/24", Self::server_address(number));
        self.server(&["addr", "add", &address, "dev", &theirs]);
        self.client(&["link", "set", &ours, "up"]);
        self.plug_one(number);
        let carrier = || ip(self.hosts()[0], &["link", "show", &ours]).contains("state UP");
        wait_for("the cable's carrier", COMMAND_TIME_MAX, || carrier().then_some(()));
    }

    /// Returns the names of a cable's ends.
    fn links(number: usize) -> [String; 2] {
        [2 * number, 2 * number + 1].map(|end| format!("cable{end}"))
    }

    /// Returns the server's address on a cable; [`Self::SERVER`] is the first.
    #[must_use]
    pub fn server_address(number: usize) -> String {
        format!("10.99.{number}.2")
    }

    fn host() -> Proc {
        let mut command = Command::new("unshare");
        command.args(["-n", "sleep", LIFE_TIME]);
        let proc = Proc::start(command);
        let netns = |pid: &str| fs::read_link(PathBuf::from(format!("/proc/{pid}/ns/net"))).ok();
        let (ours, pid) = (netns("self"), proc.pid().to_string());
        wait_for("a network namespace", COMMAND_TIME_MAX, || {
            netns(&pid).is_some_and(|its| Some(its) != ours).then_some(())
        });
        proc
    }

    /// Returns the client's host and the server's.
    #[must_use]
    pub fn hosts(&self) -> [Netns; 2] {
        [&self.ends[0], &self.ends[1]].map(|proc| Netns(proc.pid()))
    }

    /// Runs `ip` on the client's host.
    ///
    /// # Panics
    /// Panics if it fails.
    pub fn client(&self, words: &[&str]) {
        let _ = ip(self.hosts()[0], words);
    }

    /// Runs `ip` on the server's host.
    ///
    /// # Panics
    /// Panics if it fails.
    pub fn server(&self, words: &[&str]) {
        let _ = ip(self.hosts()[1], words);
    }

    /// Takes the far end down: the client's link loses its carrier but keeps everything else.
    pub fn pull(&self) {
        self.pull_one(0);
    }

    /// Brings the far end back up.
    pub fn plug(&self) {
        self.plug_one(0);
    }

    /// Pulls one of several cables.
    pub fn pull_one(&self, number: usize) {
        self.server(&["link", "set", &Self::links(number)[1], "down"]);
    }

    /// Plugs one of several cables back in.
    pub fn plug_one(&self, number: usize) {
        self.server(&["link", "set", &Self::links(number)[1], "up"]);
    }

    /// Makes the server's hardware address permanent on the client, so packets to it are lost
    /// without an error while the cable is pulled.
    ///
    /// # Panics
    /// Panics if the address cannot be determined.
    pub fn know_server(&self) {
        let shown = ip(self.hosts()[1], &["link", "show", "cable1"]);
        let mut words = shown.split_whitespace().skip_while(|word| *word != "link/ether").skip(1);
        let address = words.next().expect("a hardware address");
        let neighbor = ["neigh", "replace", Self::SERVER, "lladdr", address];
        self.client(&[&neighbor[..], &["nud", "permanent", "dev", Self::LINK]].concat());
    }
}

fn ip(Netns(pid): Netns, words: &[&str]) -> String {
    let pid = pid.to_string();
    let words = [&["-t", &pid, "-n", "--", "ip"], words].concat();
    run("nsenter", &words, COMMAND_TIME_MAX).ok().stdout
}
