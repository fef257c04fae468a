//! No two modules of a crate need each other, directly or through others: a crate can be read from the
//! bottom to the top.
//!
//! A module needs another where it imports something of it (`use`) or names it by a path. An import by
//! way of a re-export counts for the module that has the thing; a `pub use` that its own module does not
//! need is only a door.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A module, as the path of names from the crate's root.
type Module = Vec<String>;

/// A path that a module names, and how.
struct Named {
    path: Vec<String>,
    kind: Kind,
}

#[derive(PartialEq, Eq)]
enum Kind {
    /// `use`, for itself.
    Import,
    /// `pub use`, for others.
    Door,
    /// In the code.
    Path,
}

/// The source files of a crate, by module, without their tests.
fn modules(folder: &Path, of: &Module, found: &mut BTreeMap<Module, String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let module = match name.as_str() {
            "lib" | "main" | "mod" => of.clone(),
            _ => [of.clone(), vec![name]].concat(),
        };
        if path.is_dir() {
            modules(&path, &module, found);
        } else if path.extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(&path).expect("source");
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
            found.insert(module, code.collect::<Vec<_>>().join("\n"));
        }
    }
}

/// The paths of a `use` tree, such as `a::{b, c::d}`.
fn expand(tree: &str, prefix: &[String], found: &mut Vec<Vec<String>>) {
    let mut depth = 0;
    let parts = tree.split(|letter| {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        letter == ',' && depth == 0
    });
    for part in parts.map(str::trim).filter(|part| !part.is_empty()) {
        let (head, group) = match part.split_once('{') {
            Some((head, rest)) => (head, rest.rsplit_once('}').map(|(group, _)| group)),
            None => (part, None),
        };
        let names = head.split("::").map(|name| name.split(" as ").next().unwrap_or_default());
        let names = names.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
        let path = [prefix.to_vec(), names.collect()].concat();
        match group {
            Some(group) => expand(group, &path, found),
            None => found.push(path),
        }
    }
}

/// All that a module names.
fn named(code: &str) -> Vec<Named> {
    let (mut imports, mut body) = (Vec::new(), String::new());
    let mut rest = code;
    while let Some(at) = rest.find("use ") {
        let (before, after) = rest.split_at(at);
        let line = before.rsplit('\n').next().unwrap_or_default().trim();
        let is_statement = line.is_empty() || line.starts_with("pub");
        let Some((tree, next)) = after[4..].split_once(';').filter(|_| is_statement) else {
            body.push_str(&rest[..at + 4]);
            rest = &rest[at + 4..];
            continue;
        };
        body.push_str(before);
        imports.push((line.starts_with("pub"), tree));
        rest = next;
    }
    body.push_str(rest);
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
    let words: Vec<&str> = body.split(|letter| !is_word(letter)).collect();
    let in_body: BTreeSet<&str> = words.iter().flat_map(|word| word.split("::")).collect();
    let mut found = Vec::new();
    for (is_public, tree) in imports {
        let mut paths = Vec::new();
        expand(tree, &[], &mut paths);
        found.extend(paths.into_iter().map(|path| {
            let is_needed = path.last().is_some_and(|name| in_body.contains(name.as_str()));
            let kind = if is_public && !is_needed { Kind::Door } else { Kind::Import };
            Named { path, kind }
        }));
    }
    let of_crate = words
        .iter()
        .filter(|it| ["crate::", "super::", "self::"].iter().any(|start| it.starts_with(start)));
    found.extend(of_crate.map(|word| Named {
        path: word.split("::").map(str::to_owned).collect(),
        kind: Kind::Path,
    }));
    found
}

/// The module that has what `path` means in `module`; nothing where it is of another crate.
fn owner(
    all: &BTreeMap<Module, Vec<Named>>,
    module: &Module,
    path: &[String],
    seen: &mut BTreeSet<(Module, String)>,
) -> Option<Module> {
    let mut base = module.clone();
    let mut rest = path;
    match rest.first()?.as_str() {
        "crate" => (base, rest) = (Vec::new(), &rest[1..]),
        "self" => rest = &rest[1..],
        "super" => {
            while rest.first().is_some_and(|name| name == "super") {
                base.pop();
                rest = &rest[1..];
            }
        }
        first if all.contains_key(&[base.clone(), vec![first.to_owned()]].concat()) => {}
        _ => return None,
    }
    while let Some((name, next)) = rest.split_first() {
        let inner = [base.clone(), vec![name.clone()]].concat();
        if !all.contains_key(&inner) {
            break;
        }
        (base, rest) = (inner, next);
    }
    let name = rest.first().filter(|_| base != *module)?.clone();
    if !seen.insert((base.clone(), name.clone())) {
        return Some(base);
    }
    let imports = all[&base].iter().filter(|it| it.kind != Kind::Path && it.path.len() > 1);
    let mut same = imports.filter(|it| it.path.last() == Some(&name));
    same.find_map(|it| owner(all, &base, &it.path, seen)).or(Some(base))
}

/// The modules of a crate that each module needs.
fn needs(source: &Path) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut code = BTreeMap::new();
    modules(source, &Vec::new(), &mut code);
    let all: BTreeMap<Module, Vec<Named>> =
        code.into_iter().map(|(module, code)| (module, named(&code))).collect();
    let of = |module: &Module| {
        let needed = all[module].iter().filter(|it| it.kind != Kind::Door);
        let owners = needed.filter_map(|it| owner(&all, module, &it.path, &mut BTreeSet::new()));
        owners.filter(|it| it != module).collect()
    };
    all.keys().map(|module| (module.clone(), of(module))).collect()
}

/// The way from a module back to it, where there is one.
fn way_back(needs: &BTreeMap<Module, BTreeSet<Module>>, from: &Module) -> Option<Vec<Module>> {
    let mut ways: Vec<Vec<Module>> = vec![vec![from.clone()]];
    let mut seen = BTreeSet::new();
    while let Some(way) = ways.pop() {
        for next in &needs[way.last()?] {
            let longer = [way.clone(), vec![next.clone()]].concat();
            if next == from {
                return Some(longer);
            }
            if seen.insert(next.clone()) {
                ways.push(longer);
            }
        }
    }
    None
}

#[test]
fn no_modules_need_each_other() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates");
    let mut counted = 0;
    for entry in fs::read_dir(crates).expect("crates").flatten() {
        let needs = needs(&entry.path().join("src"));
        counted += needs.values().map(BTreeSet::len).sum::<usize>();
        for module in needs.keys() {
            let way = way_back(&needs, module).map(|way| {
                way.iter().map(|it| format!("crate::{}", it.join("::"))).collect::<Vec<_>>()
            });
            let name = entry.file_name();
            assert!(
                way.is_none(),
                "in '{}': {}",
                name.to_string_lossy(),
                way.unwrap_or_default().join(" -> ")
            );
        }
    }
    assert!(counted > 300, "only {counted} imports were seen");
}

#[test]
fn a_circle_is_seen_through_a_door() {
    let folder = tempfile::tempdir().expect("a folder");
    let put = |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("write");
    put("lib.rs", "mod a;\nmod b;\nmod c;\npub use b::{B, Other};\npub use a::A;\n");
    put("a.rs", "use crate::B;\npub struct A(B);\n");
    put("b.rs", "use crate::c::C;\npub struct B(C);\n");
    put("c.rs", "pub struct C;\n");
    let way = |from: &str| way_back(&needs(folder.path()), &vec![from.to_owned()]);
    assert_eq!((way("a"), way("b")), (None, None), "a door is no need");
    put("c.rs", "pub struct C(Box<super::a::A>);\n");
    let names = |way: Vec<Module>| way.concat();
    assert_eq!(way("a").map(names), Some(["a", "b", "c", "a"].map(str::to_owned).to_vec()));
}
