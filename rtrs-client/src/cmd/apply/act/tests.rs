//! Flags of a session that `apply` starts.

use clap::Parser;

use super::*;
use crate::cmd::{Command, LowArgs};

#[test]
fn flags_match_the_settings() {
    for yaml in [
        "path: [tcp://a, 'rdma://[fd00::2]@[fd00::1]:7']\nsocket: '-s p'\ncrc: off\nlog: debug\n",
        "path: tcp://a\nread-only: true\ndevice: auto\ntakeover: true\nshards: 2\n",
        "path: tcp://a\nsocket: /s\nsocket-mode: 660\nheartbeat: 50ms\nbuffer-size: 80M\n",
        "path: tcp://a\nlisten: 127.0.0.1:0\nno-path: queue-for=3s\nqueue-depth-limit: 9\n",
    ] {
        let settings = Settings::from_yaml(yaml, "s.yaml").unwrap();
        let mut args = vec!["rtrs-client".to_owned(), "attach".into()];
        args.extend(flags(&settings));
        args.extend(["--".into(), "-v".into()]);
        let parsed = LowArgs::try_parse_from(args).unwrap();
        let Command::Attach(attach) = parsed.command else { panic!("no attach") };
        assert_eq!(attach.settings(&parsed.global).unwrap(), settings, "{yaml}");
        assert_eq!(attach.names, ["-v"]);
    }
}
