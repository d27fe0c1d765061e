//! Tests of the text and map forms of an export: every option, every error, and round trips.

use super::*;
use proptest::prelude::*;

fn spec(text: &str) -> ExportSpec {
    text.parse().unwrap()
}

fn refusal(text: &str) -> String {
    text.parse::<ExportSpec>().unwrap_err().to_string()
}

fn path(text: &str) -> Target {
    Target::Path(PathBuf::from(text))
}

#[test]
fn names_and_targets_are_parsed() {
    let giga = 1 << 30;
    for (text, name, target) in [
        ("/srv/vol0.img", None, path("/srv/vol0.img")),
        ("vol0=/dev/sdb", Some("vol0"), path("/dev/sdb")),
        ("pool/vol0=/dev/sdb", Some("pool/vol0"), path("/dev/sdb")),
        ("/srv/a=b.img", None, path("/srv/a=b.img")),
        ("./a=b.img", None, path("./a=b.img")),
        ("../a=b.img", None, path("../a=b.img")),
        ("a=b=c.img", Some("a"), path("b=c.img")),
        (r"a\=b=c.img", Some("a=b"), path("c.img")),
        (r"a\=b.img", None, path("a=b.img")),
        (r"\/dev/ram0=/srv/x", Some("/dev/ram0"), path("/srv/x")),
        (r"/srv/a\,b.img", None, path("/srv/a,b.img")),
        (r"/srv/a\\b.img", None, path(r"/srv/a\b.img")),
        ("scratch=mem:1G", Some("scratch"), Target::Memory(giga)),
        ("null:1G", None, Target::Null(giga)),
        ("rbd:p/vol0", None, Target::Rbd("p/vol0".parse().unwrap())),
        ("v=rbd:p/n/vol0@s", Some("v"), Target::Rbd("p/n/vol0@s".parse().unwrap())),
        ("nbd://h/d", None, Target::Nbd("nbd://h/d".parse().unwrap())),
        (
            "nbd+unix:///d?socket=/a=b",
            None,
            Target::Nbd("nbd+unix:///d?socket=/a=b".parse().unwrap()),
        ),
        ("v=nbd://h:1/d", Some("v"), Target::Nbd("nbd://h:1/d".parse().unwrap())),
        (r"\nbd://h/d", None, path("./nbd://h/d")),
        (r"\rbd:p/vol0", None, path("./rbd:p/vol0")),
        (r"\mem:1G", None, path("./mem:1G")),
        ("./mem:1G", None, path("./mem:1G")),
    ] {
        let spec = spec(text);
        assert_eq!((spec.name.as_deref(), &spec.target), (name, &target), "{text}");
    }
}

#[test]
fn options() {
    assert!(!spec("/x,ro=off").ro);
    assert_eq!(spec("/x,rw"), spec("/x"));
    assert!(refusal("/x,ro,rw").contains("sets \"ro\" twice"));
    let spec =
        spec("v=/x,ro,direct=on,block-size=4096,no-lock,delay=10ms,error-rate=0.001,id=a\\,b");
    assert_eq!(spec.migration, Migration::Allow);
    assert_eq!("/x,migration=deny".parse::<ExportSpec>().unwrap().migration, Migration::Deny);
    assert_eq!(spec.name.as_deref(), Some("v"));
    assert!(spec.ro && spec.no_lock);
    assert_eq!(spec.direct, AutoSwitch::On);
    assert_eq!(spec.block_size.bytes(), Some(4096));
    assert_eq!(spec.delay.millis(), 10);
    assert_eq!(spec.error_rate.per_million(), 1000);
    assert_eq!(spec.id.as_ref().map(Id::get), Some("a,b"));
}

#[test]
fn access_may_be_repeated() {
    let spec = spec("v=/x,access=db1:rw,ro,access=anyone@10.0.0.0/24:ro");
    let rules: Vec<String> = spec.access.iter().map(ToString::to_string).collect();
    assert_eq!(rules, ["db1:rw", "anyone@10.0.0.0/24:ro"]);
    assert!(refusal("/x,ro,ro").contains("sets \"ro\" twice"));
    assert!(refusal("/x,access=db1").contains("has a bad access"));
    assert!(refusal("/x,access").contains("without a value"));
    let set = |options: &[&str]| {
        let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
        spec.with_options(&options)
    };
    assert_eq!(set(&["access=a:ro", "access=b:ro"]).unwrap().access.len(), 2);
    assert!(set(&["access="]).unwrap().access.is_empty());
    let listed = set(&["access=a:ro,access=b:ro,rw", "id=a\\,b"]).unwrap();
    assert_eq!((listed.access.len(), listed.ro), (2, false));
    assert_eq!(listed.id.as_ref().map(Id::get), Some("a,b"));
    assert!(set(&["access=a"]).unwrap_err().to_string().contains("has a bad access"));
}

#[test]
fn rate_limits_are_options() {
    let limited = spec("/x,iops=2000,iops-write=500,bandwidth-read=10M,burst=2s");
    let limits = limited.rate_limits();
    let expected = RateLimits {
        iops: Some(2000),
        iops_write: Some(500),
        bandwidth_read: Some(10 << 20),
        burst_ms: 2000,
        ..RateLimits::default()
    };
    assert_eq!(limits, expected);
    assert_eq!(limited, spec(&format!("/x,{limits}")));
    assert!(spec("/x").rate_limits().is_unlimited());
    let options = ["iops=0", "iops-write=none", "bandwidth-read=0", "burst=100ms"];
    let options = options.map(str::to_owned);
    assert_eq!(limited.with_options(&options).unwrap(), spec("/x"));
    let map = "target: /x\niops: 2000\niops-write: 500\nbandwidth-read: 10M\nburst: 2s\n";
    assert_eq!(serde_yaml::from_str::<ExportSpec>(map).unwrap(), limited);
    assert_eq!(spec("/x").with_live_options(&limited), limited);
}

#[test]
fn names_are_derived_from_targets() {
    for (text, name) in [
        ("/srv/vol0.img", "vol0.img"),
        ("v=/srv/vol0.img", "v"),
        ("mem:1M", "mem"),
        ("null:1M", "null"),
        ("rbd:pool/vol0", "vol0"),
        ("nbd://host/disk", "disk"),
        ("nbd+unix:///disk?socket=/run/a", "disk"),
        ("rbd:pool/team/vol0@monday,user=x,conf=/c", "vol0"),
    ] {
        assert_eq!(spec(text).resolved_name().as_deref(), Ok(name));
    }
    assert_eq!(
        spec("/srv/..").resolved_name().unwrap_err().to_string(),
        "export \"/srv/..\" has no file name to be exported under; write NAME=PATH"
    );
    let long = format!("{}=mem:1M", "n".repeat(255));
    let error = spec(&long).resolved_name().unwrap_err().to_string();
    assert!(error.contains("is 255 bytes long; use 1 to 254 bytes without NUL and .."), "{error}");
    assert!(spec(&long[1..]).resolved_name().is_ok());
    let up = spec("a..b=mem:1M").resolved_name().unwrap_err().to_string();
    assert!(up.contains("no client can open that"), "{up}");
    let nul = ExportSpec::new(Some("a\0b".into()), path("/x"));
    assert!(nul.resolved_name().unwrap_err().to_string().contains("contains a NUL"));
    let empty = ExportSpec::new(Some(String::new()), path("/x"));
    assert!(empty.resolved_name().unwrap_err().to_string().contains("is empty"));
}

#[test]
fn errors_name_the_problem() {
    for (text, part) in [
        ("", "has no target; write [NAME=]PATH, mem:SIZE, null:SIZE, rbd:POOL/IMAGE or"),
        ("v=", "has no target"),
        (",ro", "has no target"),
        ("=/x", "has an empty name; write NAME=TARGET, or only TARGET"),
        ("v=mem:", "size \"\" does not begin with a digit"),
        ("v=mem:12q", "size \"12q\" has the unknown unit \"q\""),
        ("null:x", "size \"x\" does not begin with a digit"),
        ("rbd:vol0", "does not name a pool and an image"),
        ("nbds://h/d", "has an unknown scheme"),
        ("/x\0", "contains a NUL"),
        ("/x,", "has the unknown option \"\""),
        ("/x,row", "has the unknown option \"row\"; did you mean \"ro\"?"),
        ("/x,blocksize=512", "has the unknown option \"blocksize\"; did you mean \"block-size\"?"),
        (
            "/x,y.img",
            "has the unknown option \"y.img\"; the options are ro, direct, block-size, no-lock, \
             gateway, conf, user, connect-timeout, migration, delay, error-rate, iops, iops-read, \
             iops-write, bandwidth, bandwidth-read, bandwidth-write, burst, id, access; write \\, \
             for a comma in a path",
        ),
        ("/x,ro,ro", "sets \"ro\" twice; set it once"),
        ("/x,ro=perhaps", "has a bad ro: switch \"perhaps\" is not valid; use on or off"),
        ("/x,direct", "has \"direct\" without a value; write direct=VALUE"),
        ("/x,direct=maybe", "has a bad direct: switch \"maybe\" is not valid; use auto, on or off"),
        ("/x,block-size=1k", "block-size \"1k\" is not valid; use auto, 512 or 4096"),
        ("/x,delay=10ns", "has a bad delay: time \"10ns\" has the unknown unit \"ns\""),
        ("/x,delay=10", "has a bad delay: time \"10\" has no unit; write 10s or 10ms"),
        ("/x,delay=11m", "time \"11m\" is out of range; use 0s to 10m"),
        ("/x,error-rate=2", "error-rate \"2\" is not a fraction of requests; use 0 to 1"),
        ("/x,iops=fast", "has a bad iops: rate \"fast\" is not a whole number of requests per"),
        ("/x,bandwidth=10", "rate \"10\" is out of range; use none or 64k to 1T, in bytes per"),
        ("/x,burst=2m", "has a bad burst: time \"2m\" is out of range; use 10ms to 1m"),
        ("/x,id=", "has a bad id: id \"\" is empty; write 1 to 255 bytes"),
        ("/x\\", "ends with a backslash that escapes nothing; write \\\\ for a backslash"),
    ] {
        let error = refusal(text);
        assert!(error.starts_with("export ") && error.contains(part), "{error} lacks {part}");
    }
}

#[test]
fn error_rates_are_parsed() {
    for (text, rate, printed) in [
        ("0", 0, "0"),
        ("1", 1_000_000, "1"),
        ("1.0", 1_000_000, "1"),
        ("0.5", 500_000, "0.5"),
        ("0.000001", 1, "0.000001"),
    ] {
        let parsed: ErrorRate = text.parse().unwrap();
        assert_eq!((parsed.per_million(), parsed.to_string().as_str()), (rate, printed));
    }
    for text in ["", ".", "1.", ".5", "-1", "1.000001", "0.0000001", "1e-3", "10", "5%"] {
        assert!(text.parse::<ErrorRate>().is_err(), "{text}");
    }
}

#[test]
fn the_map_form_needs_no_escapes() {
    let map = "name: a=b\ntarget: /srv/x,y=z\nro: true\nblock-size: 512\nerror-rate: 0.25\n";
    let spec: ExportSpec = serde_yaml::from_str(map).unwrap();
    assert_eq!(spec.name.as_deref(), Some("a=b"));
    assert_eq!(spec.target, path("/srv/x,y=z"));
    assert!(spec.ro && spec.error_rate.per_million() == 250_000);
    assert_eq!(spec.block_size, BlockSize::B512);
    let error = serde_yaml::from_str::<ExportSpec>("name: x").unwrap_err().to_string();
    assert!(error.contains("missing field `target`"), "{error}");
}

fn any_spec() -> impl Strategy<Value = ExportSpec> {
    let size = 1u64..1 << 40;
    let target = prop_oneof![
        r"(/|\./|)[a-z0-9,=\\. :é]{1,12}".prop_map(|text| match text.parse() {
            Ok(target @ Target::Path(_)) => target,
            _ => path("/x"),
        }),
        size.clone().prop_map(Target::Memory),
        size.prop_map(Target::Null),
        "[a-z0-9]{1,4}(/[a-z0-9]{1,4}){1,2}(@[a-z]{1,3})?"
            .prop_map(|text| { Target::Rbd(text.parse().expect("a name")) }),
    ];
    let switch = prop::sample::select(vec![AutoSwitch::Auto, AutoSwitch::On, AutoSwitch::Off]);
    let block = prop::sample::select(vec![BlockSize::Auto, BlockSize::B512, BlockSize::B4096]);
    let name = proptest::option::of(r"[a-z0-9,=\\./:é]{1,12}");
    (name, target, any::<bool>(), switch, block, 0u64..100_000, 0u32..=1_000_000).prop_map(
        |(name, target, ro, direct, block_size, delay, rate)| ExportSpec {
            ro,
            direct,
            block_size,
            delay: Time::new(std::time::Duration::from_micros(delay)),
            error_rate: ErrorRate(rate),
            ..ExportSpec::new(name, target)
        },
    )
}

proptest! {
    #[test]
    fn the_map_form_prints_as_it_is_read(spec in any_spec()) {
        let yaml = serde_yaml::to_string(&spec).unwrap();
        prop_assert_eq!(serde_yaml::from_str::<ExportSpec>(&yaml).unwrap(), spec);
    }

    #[test]
    fn no_text_panics(text in r"\PC{0,20}|[a-z=,\\/.]{0,20}") {
        let _ = text.parse::<ExportSpec>();
    }
}
