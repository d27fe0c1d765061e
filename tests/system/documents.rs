//! Tests of the documents that packages install with the daemons: manual pages that man renders
//! without warnings, and completions that the shells accept. Also the text of `--version`.

use std::fs;
use std::path::Path;
use std::process::Command;

use rtrs_tests::{COMMAND_TIME_MAX, Proc, Scratch, bin, requires, run};

#[path = "../../scripts/version.rs"]
#[expect(dead_code, reason = "a build script; the test calls one of its functions")]
mod version;

const PROGRAMS: [&str; 3] = ["rtrs-server", "rtrs-client", "rds"];

/// Returns the pages about the configuration files of a program.
fn formats(program: &str) -> &'static [&'static str] {
    match program {
        "rtrs-server" => &["rtrs-server.yaml", "exports.d"],
        "rtrs-client" => &["rtrs-client.yaml", "volumes.yaml"],
        _ => &["rds.yaml"],
    }
}

/// Returns the name of the page about the program itself.
fn root_page(program: &str) -> String {
    format!("{program}.{}", if program == "rds" { 1 } else { 8 })
}

/// Whether a file is a manual page: its name ends with a section.
fn is_page(name: &str) -> bool {
    let end = name.rsplit_once('.').map_or("", |(_, end)| end);
    ["1", "5", "8"].contains(&end)
}

/// Returns a directory with the documents of a program.
fn documents(program: &str) -> Scratch {
    let scratch = Scratch::new();
    let _ = run(bin(program), &["documents", &scratch.text("documents")], COMMAND_TIME_MAX).ok();
    scratch
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("the documents");
    entries.map(|entry| entry.expect("a file").file_name().to_string_lossy().into_owned()).collect()
}

/// Returns the commands that `--help` lists.
fn commands(program: &str) -> Vec<String> {
    let help = run(bin(program), &["--help"], COMMAND_TIME_MAX).ok().stdout;
    let list = help.split_once("Commands:\n").expect("a list of commands").1;
    let lines = list.lines().take_while(|line| line.starts_with("  "));
    let words = lines.filter_map(|line| line.split_whitespace().next());
    words.filter(|word| *word != "help").map(str::to_owned).collect()
}

#[test]
fn man_renders_a_page_for_each_command_without_warnings() {
    if !requires(&["man"]) {
        return;
    }
    for program in PROGRAMS {
        let scratch = documents(program);
        let names = names(&scratch.path("documents"));
        let mut wanted = vec![root_page(program)];
        wanted.extend(commands(program).iter().map(|name| {
            let section = if program == "rds" && name != "node" { 1 } else { 8 };
            format!("{program}-{name}.{section}")
        }));
        wanted.extend(["session", "export"].map(|name| format!("rtrs-server-{name}-list.8")));
        wanted.retain(|page| page.starts_with(program));
        wanted.extend(formats(program).iter().map(|name| format!("{name}.5")));
        for page in &wanted {
            assert!(names.contains(page), "no {page} in {names:?}");
        }
        let pages: Vec<&String> = names.iter().filter(|name| is_page(name)).collect();
        assert!(!pages.iter().any(|page| page.contains("help") || page.contains("udev")));
        for page in pages {
            let path = scratch.path("documents").join(page);
            let mut man = Command::new("man");
            man.args(["--warnings", "--encoding=UTF-8", "--local-file"]).arg(&path);
            man.envs([("MANWIDTH", "80"), ("LC_ALL", "C.UTF-8"), ("MAN_KEEP_STDERR", "1")]);
            let read = Proc::start(man).wait(COMMAND_TIME_MAX).ok();
            assert_eq!(read.stderr, "", "{page}");
            assert!(read.stdout.contains("NAME"), "{page}: {}", read.stdout);
        }
    }
}

/// Returns the text of a section of a page; empty if the page lacks it.
fn section<'a>(page: &'a str, name: &str) -> &'a str {
    let lines = [format!("\n.SH {name}\n"), format!("\n.SH \"{name}\"\n")];
    let rest = lines.iter().find_map(|line| page.split_once(line.as_str()));
    rest.map_or("", |(_, rest)| rest.split("\n.SH ").next().unwrap_or(""))
}

#[test]
fn each_page_has_all_its_sections() {
    // Prefixes of a value: of a placeholder, and of a key's value.
    let values = ["\\fI", ": "];
    for program in PROGRAMS {
        let scratch = documents(program);
        let dir = scratch.path("documents");
        for name in names(&dir).iter().filter(|name| is_page(name)) {
            let page = fs::read_to_string(dir.join(name)).expect("a page");
            let of = |name: &str| section(&page, name);
            for part in ["NAME", "SYNOPSIS", "DESCRIPTION", "EXAMPLES", "SEE ALSO"] {
                assert!(!of(part).trim().is_empty(), "{name} lacks {part}");
            }
            let has_value = values.iter().any(|value| of("SYNOPSIS").contains(value));
            assert!(has_value, "{name}: its synopsis shows no value");
            let is_format = name.ends_with(".5");
            assert_eq!(of("EXIT STATUS").is_empty(), is_format, "{name}");
            let (base, number) = name.rsplit_once('.').expect("a section");
            let title = format!(".TH {base} {number} ");
            assert!(page.contains(&title), "{name} does not begin with {title}");
            for (other, its) in references(of("SEE ALSO")) {
                let file = format!("{other}.{its}");
                let is_own = other == program || other.starts_with(&format!("{program}-"));
                assert!(!is_own || dir.join(&file).is_file(), "{name} names {file}");
            }
        }
        let root = fs::read_to_string(dir.join(root_page(program))).expect("its page");
        assert!(!section(&root, "FILES").is_empty(), "{program} lacks FILES");
    }
}

/// Returns the pages that a section names, with their sections.
fn references(text: &str) -> Vec<(String, String)> {
    let plain = text.replace("\\fB", "").replace("\\fR", "").replace('\\', "");
    let words = plain.split([',', ' ', '\n']);
    let pairs = words.filter_map(|word| word.strip_suffix(')')?.split_once('('));
    pairs.map(|(page, number)| (page.to_owned(), number.to_owned())).collect()
}

/// Types lines into an interactive bash and returns its output.
fn typed_into_bash(lines: &str) -> String {
    let scratch = Scratch::new();
    let typed = scratch.path("typed");
    fs::write(&typed, lines).expect("write what is typed");
    let shell = "script -qec 'bash --norc --noprofile -i' /dev/null";
    let mut command = Command::new("sh");
    command.args(["-c", &format!("exec {shell} <{}", typed.display())]);
    command.envs([("TERM", "dumb"), ("HOME", &scratch.text(""))]);
    Proc::start(command).wait(COMMAND_TIME_MAX).stdout
}

#[test]
fn bash_completes_commands_flags_and_values() {
    if !requires(&["bash", "script"]) {
        return;
    }
    for (program, typed, completed) in [
        (
            "rtrs-client",
            "att\tvol0 --retry\t1m --polic\tx",
            "attach vol0 --retry-for 1m --policy x",
        ),
        ("rtrs-client", "path disc\tvol0", "path disconnect vol0"),
        ("rtrs-server", "sess\tevi\tclient", "session evict client"),
        ("rtrs-server", "--out\tj\t--que\t5", "--output json --queue-depth 5"),
        ("rds", "node lis\t--socket\tx", "node list --socket-dir x"),
    ] {
        let scratch = documents(program);
        let file = scratch.path("documents").join(format!("{program}.bash"));
        let text = typed_into_bash(&format!(
            "source {}\n{program}() {{ echo \"ran: $*.\"; }}\n{program} {typed}\nexit\n",
            file.display()
        ));
        assert!(text.contains(&format!("ran: {completed}.")), "{typed:?}: {text}");
    }
}

#[test]
fn fish_and_zsh_load_their_completions() {
    for program in PROGRAMS {
        let scratch = documents(program);
        let file = |name: String| scratch.path("documents").join(name).display().to_string();
        let fish = file(format!("{program}.fish"));
        if requires(&["fish"]) {
            let command = format!("source {fish}; complete -C '{program} '");
            let offered = run("fish", &["--no-config", "-c", &command], COMMAND_TIME_MAX).ok();
            for name in commands(program) {
                let line = offered.stdout.lines().any(|line| line.starts_with(&name));
                assert!(line, "{name}: {}", offered.stdout);
            }
        }
        if requires(&["zsh"]) {
            let zsh = file(format!("_{program}"));
            assert_eq!(run("zsh", &["-n", &zsh], COMMAND_TIME_MAX).ok().stderr, "");
            let text = fs::read_to_string(&zsh).expect("the completion");
            assert!(text.starts_with(&format!("#compdef {program}\n")), "{zsh}");
        }
    }
}

#[test]
fn the_version_shows_features_and_revision() {
    let features = if cfg!(feature = "verbs") { "verbs" } else { "none" };
    for program in PROGRAMS {
        let version = run(bin(program), &["--version"], COMMAND_TIME_MAX).ok().stdout;
        let rest = version.strip_prefix(&format!("{program} {} (", env!("CARGO_PKG_VERSION")));
        let rest = rest.unwrap_or_else(|| panic!("{version}"));
        let end = match program {
            "rds" => ")\n".to_owned(),
            _ => format!(", features: {features})\n"),
        };
        let build = rest.strip_suffix(&end);
        let build = build.unwrap_or_else(|| panic!("{version}"));
        let hex = build.strip_prefix("revision ").map(|text| text.trim_end_matches("-dirty"));
        let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_good = hex.is_none_or(|text| text == "unknown" || text.len() >= 12 && is_hex(text));
        assert!(is_good && (hex.is_some() || build == "debug build"), "{version}");
    }
}

#[test]
fn the_revision_is_that_of_the_work_tree_root() {
    if !requires(&["git"]) {
        return;
    }
    let scratch = Scratch::new();
    assert_eq!(version::revision(scratch.dir()), None, "no repository");
    let git = |args: &[&str]| {
        let place = ["-C", &scratch.text(""), "-c", "user.name=n", "-c", "user.email=e"];
        run("git", &[&place[..], args].concat(), COMMAND_TIME_MAX).ok().stdout
    };
    let _ = git(&["init", "--quiet"]);
    assert_eq!(version::revision(scratch.dir()), None, "no commit");
    fs::write(scratch.path("file"), "1").expect("write a file");
    let _ = git(&["add", "file"]);
    let _ = git(&["commit", "--quiet", "--message=m"]);
    let commit = git(&["rev-parse", "HEAD"]);
    assert_eq!(version::revision(scratch.dir()).as_deref(), commit.get(..12));
    fs::write(scratch.path("file"), "2").expect("write a file");
    let dirty = format!("{}-dirty", commit.get(..12).expect("a commit"));
    assert_eq!(version::revision(scratch.dir()), Some(dirty));
    fs::create_dir(scratch.path("unpacked")).expect("create a directory");
    assert_eq!(
        version::revision(&scratch.path("unpacked")),
        None,
        "the revision of another repository"
    );
}
