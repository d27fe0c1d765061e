//! Two hosts on this machine, joined by a cable that can be pulled: two network namespaces, each
//! held by a process that sleeps, and a veth pair. It takes root, and goes with its handle.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::proc::{Proc, bin, run};
use crate::requires::{is_root, requires, skip};
use crate::{COMMAND_TIME_MAX, wait_for};

/// How long the processes that hold the namespaces live at most, should nobody end them.
const LIFE_TIME: &str = "900";

/// A host of its own: a network namespace, by a process that is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Netns(u32);

impl Netns {
    /// A program of this project, on this host; on the machine itself without one.
    pub(crate) fn program(netns: Option<Self>, name: &str) -> Command {
        let Some(Self(pid)) = netns else { return Command::new(bin(name)) };
        let mut command = Command::new("nsenter");
        command.args(["-t", &pid.to_string(), "-n", "--"]).arg(bin(name));
        command
    }
}

/// A veth pair, the client's end and the server's.
#[derive(Debug)]
pub struct Cable {
    ends: [Proc; 2],
}

impl Cable {
    /// The server's address.
    pub const SERVER: &str = "10.99.0.2";
    /// The client's end.
    pub const LINK: &str = "cable0";

    /// Lays one between two new hosts. `None` where that is not possible, which is said aloud.
    ///
    /// # Panics
    /// When it should be possible and is not.
    #[must_use]
    pub fn lay() -> Option<Self> {
        if !requires(&["ip", "nsenter", "unshare"]) {
            return None;
        }
        if !is_root() {
            skip("network namespaces take root");
            return None;
        }
        let tried = run("unshare", &["-n", "ip", "link", "add", "type", "veth"], COMMAND_TIME_MAX);
        if tried.code != Some(0) {
            skip(&format!("no network namespace with a veth pair: {}", tried.stderr.trim()));
            return None;
        }
        let cable = Self { ends: [Self::host(), Self::host()] };
        let [client, server] = cable.hosts().map(|Netns(pid)| pid.to_string());
        let pair = ["link", "add", Self::LINK, "netns", &client, "type", "veth"];
        let peer = ["peer", "name", "cable1", "netns", &server];
        let _ = run("ip", &[&pair[..], &peer[..]].concat(), COMMAND_TIME_MAX).ok();
        // No address of IPv6 comes up by itself while a test waits for other news.
        cable.client(&["link", "set", Self::LINK, "addrgenmode", "none"]);
        cable.server(&["link", "set", "cable1", "addrgenmode", "none"]);
        cable.client(&["addr", "add", "10.99.0.1/24", "dev", Self::LINK]);
        cable.server(&["addr", "add", &format!("{}/24", Self::SERVER), "dev", "cable1"]);
        cable.client(&["link", "set", Self::LINK, "up"]);
        cable.plug();
        wait_for("the cable's carrier", COMMAND_TIME_MAX, || cable.has_carrier().then_some(()));
        Some(cable)
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

    /// The client's host and the server's.
    #[must_use]
    pub fn hosts(&self) -> [Netns; 2] {
        [&self.ends[0], &self.ends[1]].map(|proc| Netns(proc.pid()))
    }

    /// Runs `ip` on the client's host.
    ///
    /// # Panics
    /// When it fails.
    pub fn client(&self, words: &[&str]) {
        let _ = ip(self.hosts()[0], words);
    }

    fn server(&self, words: &[&str]) {
        let _ = ip(self.hosts()[1], words);
    }

    /// The far end is gone: the client's link loses its carrier and keeps all else.
    pub fn pull(&self) {
        self.server(&["link", "set", "cable1", "down"]);
    }

    /// The far end is there again.
    pub fn plug(&self) {
        self.server(&["link", "set", "cable1", "up"]);
    }

    fn has_carrier(&self) -> bool {
        ip(self.hosts()[0], &["link", "show", Self::LINK]).contains("state UP")
    }

    /// The server's hardware address stays known to the client: what it sends to it is lost while
    /// the cable is pulled, and no error tells so.
    ///
    /// # Panics
    /// When the address cannot be had.
    pub fn know_server(&self) {
        let shown = ip(self.hosts()[1], &["link", "show", "cable1"]);
        let mut words = shown.split_whitespace().skip_while(|word| *word != "link/ether").skip(1);
        let address = words.next().expect("a hardware address");
        let neighbour = ["neigh", "replace", Self::SERVER, "lladdr", address];
        self.client(&[&neighbour[..], &["nud", "permanent", "dev", Self::LINK]].concat());
    }
}

fn ip(Netns(pid): Netns, words: &[&str]) -> String {
    let pid = pid.to_string();
    let words = [&["-t", &pid, "-n", "--", "ip"], words].concat();
    run("nsenter", &words, COMMAND_TIME_MAX).ok().stdout
}
