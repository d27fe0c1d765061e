//! Tests of the `apply` file: accepted contents, errors, and the output of `save`.

use rtrs_core::prng::Prng;

use super::*;

const EXAMPLE: &str = include_str!("../../../configs/volumes.yaml");

fn error(text: &str) -> String {
    read(text, "v.yaml").unwrap_err().chain().to_string()
}

fn run_dir() -> RunDir {
    RunDir::new(Some("/run/x".into())).unwrap()
}

fn plan_wanted(volume: &Volume) -> AttachPlan {
    let mut settings = volume.settings.clone();
    settings.place.run_dir = Some("/run/x".into());
    AttachPlan::new(&volume.name, settings, Output::Text).unwrap()
}

#[test]
fn the_example_is_valid() {
    let volumes = read(EXAMPLE, "volumes.yaml").unwrap();
    let names: Vec<&str> = volumes.iter().map(|volume| volume.name.as_str()).collect();
    assert_eq!(names, ["vol0", "vol1", "vol2"]);
    volumes
        .iter()
        .map(plan_wanted)
        .for_each(|plan| assert!(!plan.session.settings.path.is_empty()));
}

#[test]
fn settings_belong_to_the_session_or_the_volume() {
    let text = "
sessions:
- name: vol
  path: [tcp://a, tcp://b]
  policy: round-robin
  takeover: true
  device-dead-timeout: 10s
  volumes:
  - {export: vol, device: auto, read-only: true, device-dead-timeout: 20s}
";
    let [volume] = &read(text, "v.yaml").unwrap()[..] else { panic!("one session") };
    let plan = plan_wanted(volume);
    assert_eq!(plan.session.settings.path.len(), 2);
    assert_eq!(plan.session.settings.policy.to_string(), "round-robin");
    assert!(plan.session.settings.read_only && plan.settings.takeover);
    let dead = plan.settings.device_dead_timeout.map(|time| time.to_string());
    assert_eq!(dead.as_deref(), Some("20s"), "the volume's counts");
    for empty in ["", "# nothing", "sessions:", "sessions: []", "{}"] {
        assert_eq!(read(empty, "v.yaml").unwrap(), [], "{empty:?}");
    }
    // A name that looks like a number is a name.
    let text = "sessions: [{path: tcp://a, volumes: [{export: 7, socket: /s}]}]";
    assert_eq!(read(text, "v.yaml").unwrap()[0].name, "7");
}

#[test]
fn errors_name_their_place() {
    let of = |session: &str| format!("sessions:\n- {session}");
    let too_many: String = (0..=VOLUMES_MAX).map(|at| format!("{{export: v{at}}}, ")).collect();
    let too_many = format!("{{volumes: [{too_many}]}}");
    for (text, part) in [
        ("[]".to_owned(), "v.yaml:1: expected the key sessions"),
        ("session: []".into(), "v.yaml:1: unknown key \"session\"; the only key is \"sessions\""),
        ("sessions: 3".into(), "v.yaml:1: sessions is not a list"),
        ("sessions: [1".into(), "v.yaml:2: did not find"),
        (of("3"), "v.yaml:2: session 1: expected a map"),
        (of("{path: tcp://a}"), "session 1: the session has no volume"),
        (
            of("{volumes: [{export: v}, {export: w, buffer-size: 80M}]}"),
            "session \"v\": volume \"w\": buffer-size is shared by the volumes",
        ),
        (of("{volumes: [{export: v}, {export: v}]}"), "volume \"v\" is listed twice"),
        (
            of("{volumes: [{export: v}]}\n- {volumes: [{export: w}, {export: v}]}"),
            "\"v\" is listed",
        ),
        (
            of("{volumes: [{export: v}]}\n- {volumes: [{export: w, name: v}]}"),
            "session \"v\": it is listed twice; list it once, or give its volume a different name",
        ),
        (
            of("{volumes: [{export: v}, {export: v, name: w}]}"),
            "session \"v\": export \"v\" is listed twice; a session can list an export only once",
        ),
        (of("{export: v, volumes: [{export: v}]}"), "export belongs to a volume; move it below"),
        (of("{volumes: [{name: v}]}"), "session \"v\": its volume has no export"),
        (
            of("{read-only: true, volumes: [{export: v}, {export: w}]}"),
            "session \"v\": read-only belongs to one of the volumes; move it below volumes",
        ),
        (of("{volumes: [{export: v}, {device: auto}]}"), "one of its volumes has no export"),
        (of("{volumes: [{export: v}, {export: w, policy: x}]}"), "policy belongs to the session"),
        (of("{volumes: [{export: v}, {export: w, access: x}]}"), "volume \"w\": access"),
        (of(&too_many), "129 volumes are too many; use at most 128"),
        (of("{name: v, volumes: 3}"), "volumes is not a list"),
        (of("{name: v, volumes: [3]}"), "expected a map with export"),
        (of("{name: v, volumes: [{device: auto}]}"), "its volume has no export"),
        (of("{name: v, volumes: [{export: [1]}]}"), "export must be a string"),
        (
            of("{name: v, volumes: [{export: w}]}"),
            "the session is named after its first volume, \"w\"",
        ),
        (of("{device: auto, volumes: [{export: w}]}"), "session \"w\": device belongs to a volume"),
        (of("{volumes: [{export: w, policy: x}]}"), "policy belongs to the session"),
        (
            of("{volumes: [{export: w, sokcet: /s}]}"),
            "unknown key \"sokcet\" below volumes; did you mean \"socket\"?",
        ),
        (of("{volumes: [{export: w, foreground: true}]}"), "foreground cannot be set here"),
        (
            of("{polcy: x, volumes: [{export: w}]}"),
            "unknown key \"polcy\"; did you mean \"policy\"?",
        ),
        (of("{policy: best, volumes: [{export: w}]}"), "policy \"best\""),
        (of("{run-dir: /x, volumes: [{export: w}]}"), "unknown key \"run-dir\""),
        (
            of("{volumes: [{export: w}]}\n- {volumes: [{export: w}]}"),
            "session \"w\": it is listed twice",
        ),
    ] {
        let shown = error(&text);
        assert!(shown.contains(part), "{text}\n{shown}");
    }
}

#[test]
fn errors_name_the_line_of_the_wrong_key() {
    let good = "sessions:
- path: tcp://a
  volumes:
  - export: v
    socket: /s
- path: tcp://a
  policy: round-robin
  volumes:
  - export: w
    socket: /t
    access: rw
  - export: x
    socket: /u
";
    assert_eq!(read(good, "v.yaml").unwrap().len(), 2);
    assert_eq!([0, 1].map(|at| line_of_session(good, at)), [2, 6]);
    for (right, wrong, line, what) in [
        ("policy: round-robin", "policy: best", 7, "policy \"best\""),
        ("policy: round-robin", "bogus: 1", 7, "unknown key \"bogus\""),
        ("policy: round-robin", "socket: /x", 7, "socket belongs to one of the volumes"),
        ("access: rw", "access: all", 11, "access \"all\""),
        ("access: rw", "device: [1]", 11, "invalid type: sequence"),
        ("access: rw", "bogus: 1", 11, "unknown key \"bogus\" below volumes"),
        ("socket: /u", "sokcet: /u", 13, "unknown key \"sokcet\" below volumes"),
        ("socket: /u", "socket-mode: x", 13, "volume \"x\": mode \"x\""),
        ("export: x", "export: v", 6, "volume \"v\" is listed twice"),
    ] {
        let shown = error(&good.replace(right, wrong));
        let expected = format!("v.yaml:{line}: session \"w\": {what}");
        assert!(shown.starts_with(&expected), "{wrong}: {shown}");
    }
}

#[test]
fn running_volumes_are_written_as_they_are_read() {
    for (session, volume) in [
        ("path: tcp://a", "socket: /s"),
        (
            "path: [tcp://a, \"rdma://10.0.0.3@b:7\"], policy: min-latency, crc: off",
            "listen: '127.0.0.1:7'",
        ),
        ("path: tcp://a, no-path: queue", "device: auto, takeover: true, read-only: true"),
        ("path: tcp://a, shards: 1", "device: /dev/nbd3, quick-takeover: true"),
        ("path: tcp://a, session-name: x", "device: auto, device-timeout: 5m, slow-io: fail"),
        ("path: tcp://a", "socket: /s, socket-mode: 660, socket-owner: root, access: ro"),
    ] {
        let text = format!("sessions: [{{{session}, volumes: [{{export: v.1, {volume}}}]}}]");
        let wanted = plan_wanted(&read(&text, "v.yaml").unwrap()[0]);
        // The values as reported by a daemon in the background.
        let mut values = wanted.values();
        values
            .iter_mut()
            .filter(|value| value.name == FOREGROUND)
            .for_each(|v| v.value = true.into());
        let paths = wanted.session.settings.path.iter().map(ToString::to_string).collect();
        let running = plan_of("v.1", values, paths, &run_dir()).unwrap();
        assert_eq!(running, wanted, "{text}");
        let map = Mapping::from_iter([(
            "sessions".into(),
            vec![Value::from(session_of(&running))].into(),
        )]);
        let written = serde_yaml::to_string(&map).unwrap();
        let read_again = plan_wanted(&read(&written, "w.yaml").unwrap()[0]);
        assert_eq!(read_again, wanted, "{written}");
        let default = ["buffer-size", "heartbeat", "log", "foreground", "poll"];
        assert!(default.iter().all(|key| !written.contains(key)), "{written}");
    }
}

/// Plans of the volumes of a session in the file.
fn plans_wanted(session: &Volume) -> Vec<AttachPlan> {
    let first = plan_wanted(session);
    let more = session.more.iter().map(|(name, own)| first.adding(name, own).unwrap());
    let mut plans: Vec<AttachPlan> = more.collect();
    plans.insert(0, first);
    plans
}

/// Plans of a few volumes that share a session, each with its own place and access.
fn some_session(prng: &mut Prng, at: usize) -> Vec<AttachPlan> {
    let pick = |prng: &mut Prng, from: &[&str]| from[prng.index(from.len())].to_owned();
    let own = |prng: &mut Prng, name: &str| {
        let mut own = match prng.index(4) {
            0 => format!("socket: '/run/{name}'"),
            1 => "socket: '/run/{name}', socket-mode: 660, socket-owner: root".to_owned(),
            2 => format!("listen: '127.0.0.1:{}'", prng.range(0..=65535)),
            _ => pick(prng, &["device: auto", "device: /dev/nbd7"]),
        };
        own += &pick(prng, &["", "", ", access: rw", ", read-only: true", ", access: ro"]);
        own + &pick(prng, &["", "", ", identity: -/00112233445566778899aabbccddeeff"])
    };
    let shared = [
        pick(prng, &["", ", policy: min-latency", ", crc: off, log: debug"]),
        pick(prng, &["", ", no-path: queue", ", no-path: queue-for=9s", ", io-timeout: 7s"]),
        pick(prng, &["", &format!(", session-name: 's {at}'")]),
    ];
    let mut names: Vec<String> = (0..=prng.index(5)).map(|n| format!("v{at}.{n}")).collect();
    // Some names need quotes, and one looks like a number.
    names.extend((at == 0).then(|| "7".to_owned()));
    names.extend((at == 1).then(|| "pool/a: b".to_owned()));
    let mut entries: Vec<String> = names
        .iter()
        .map(|name| {
            let named = match prng.index(3) {
                0 => format!("export: 'e {name}', name: '{name}'"),
                1 => format!("export: '{name}', name: '{name}'"),
                _ => format!("export: '{name}'"),
            };
            format!("{named}, {}", own(prng, &name.replace([' ', ':'], "-")))
        })
        .collect();
    entries[0] += &pick(prng, &["", ", buffer-size: 80M", ", slow-io: fail"]);
    if entries[0].contains("device") {
        entries[0] += &pick(prng, &["", ", takeover: true", ", device-timeout: 10m"]);
    }
    let text = format!(
        "sessions: [{{path: [tcp://a{at}, 'tcp://[fd00::2]@[fd00::1]:7']{}, volumes: [{{{}}}]}}]",
        shared.concat(),
        entries.join("}, {")
    );
    let read = read(&text, "v.yaml").unwrap_or_else(|error| panic!("{}\n{text}", error.chain()));
    let [session] = &read[..] else { panic!("one session") };
    plans_wanted(session)
}

#[test]
fn random_sessions_of_several_volumes_survive_a_save() {
    let (mut several, mut renamed) = (0, 0);
    for seed in 0..40 {
        let prng = &mut Prng::new(seed);
        let mut sessions: Vec<Vec<AttachPlan>> =
            (0..=prng.index(4)).map(|at| some_session(prng, at)).collect();
        for plans in &mut sessions {
            // Volumes come and go: the first volume may be gone, or may have returned last.
            let len = plans.len();
            plans.rotate_left(prng.index(len));
            plans.truncate(1 + prng.index(len));
        }
        let entries = sessions.iter().map(|plans| {
            let (session, differ) = session_of_volumes(plans);
            assert!(differ.is_empty(), "seed {seed}: {differ:?}");
            Value::from(session)
        });
        let entries: Vec<Value> = entries.collect();
        let map = Mapping::from_iter([("sessions".into(), entries.into())]);
        let written = serde_yaml::to_string(&map).unwrap();
        let read_again: Vec<Vec<AttachPlan>> =
            read(&written, "w.yaml").unwrap().iter().map(plans_wanted).collect();
        assert_eq!(read_again.len(), sessions.len(), "seed {seed}:\n{written}");
        for (wanted, made) in sessions.iter().zip(&read_again) {
            assert_eq!(made.len(), wanted.len(), "seed {seed}:\n{written}");
            assert!(wanted.iter().all(|plan| made.contains(plan)), "seed {seed}:\n{written}");
            several += usize::from(wanted.len() > 1);
        }
        let plans = sessions.iter().flatten().map(|plan| &plan.session);
        let differing = plans.filter(|session| session.name != session.export_name).count();
        assert_eq!(written.matches("    name: ").count(), differing, "seed {seed}:\n{written}");
        renamed += differing;
        // A second save writes the same text.
        let again = read_again.iter().map(|plans| Value::from(session_of_volumes(plans).0));
        let again: Vec<Value> = again.collect();
        let again = Mapping::from_iter([("sessions".into(), again.into())]);
        assert_eq!(serde_yaml::to_string(&again).unwrap(), written, "seed {seed}");
    }
    assert!(several > 20, "only {several} sessions had several volumes");
    assert!(renamed > 20, "only {renamed} volumes had a name other than their export's");
}
