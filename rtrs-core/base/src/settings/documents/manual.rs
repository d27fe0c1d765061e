//! Parts of manual pages that cannot be derived from a command line.

use crate::settings::declare::Described;

/// Sections, examples and files of a program's manual pages.
#[derive(Debug)]
pub struct Manual {
    /// Version of the program.
    pub version: &'static str,
    /// Section of the page of a command, such as `export add`, or of the program itself (`""`).
    pub section: fn(&str) -> u8,
    /// Command lines, with comments above them and empty lines between them. An example appears on
    /// the page of its command, or of its parent commands that have no examples.
    pub examples: &'static str,
    /// Files that the program uses.
    pub files: &'static [FileUse],
    /// Formats of configuration files; each has a page in section 5.
    pub formats: Vec<FormatPage>,
    /// Pages of other programs, such as `rtrs-client(8)`.
    pub see_also: &'static [&'static str],
}

/// File listed in the FILES section of manual pages.
#[derive(Debug)]
pub struct FileUse {
    /// Path.
    pub path: &'static str,
    /// Description of its content, in full sentences.
    pub what: &'static str,
    /// Page of its format in section 5; empty if there is none.
    pub format: &'static str,
    /// Commands that use the file, such as `export add`, or the parent of such commands, such as
    /// `export`. The page of the program lists all files.
    pub commands: &'static [&'static str],
}

/// Format of a configuration file.
#[derive(Debug)]
pub struct FormatPage {
    /// Name of the page.
    pub name: &'static str,
    /// Summary, in one line without a full stop.
    pub about: &'static str,
    /// Paragraphs, with empty lines between them.
    pub description: &'static str,
    /// Keys, as the settings declare them.
    pub keys: Vec<KeyGroup>,
    /// Content of an example file.
    pub example: &'static str,
}

/// Keys in one part of a configuration file.
#[derive(Debug)]
pub struct KeyGroup {
    /// Heading of their section.
    pub heading: String,
    /// Text before the first key.
    pub opening: String,
    /// Indentation of the other keys.
    pub indent: &'static str,
    /// Declarations.
    pub keys: Vec<Described>,
}

impl KeyGroup {
    /// Groups declarations by section.
    #[must_use]
    pub fn by_section(described: Vec<Described>) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        let mut section = None;
        for one in described {
            if section != Some(one.section) {
                section = Some(one.section);
                groups.push(match one.section {
                    "" => Self {
                        heading: "KEYS".into(),
                        opening: String::new(),
                        indent: "",
                        keys: Vec::new(),
                    },
                    name => Self {
                        heading: format!("KEYS BELOW {}", name.to_uppercase()),
                        opening: format!("{name}:\n  "),
                        indent: "  ",
                        keys: Vec::new(),
                    },
                });
            }
            groups.last_mut().expect("a group").keys.push(one);
        }
        groups
    }
}
