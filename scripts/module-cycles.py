#!/usr/bin/env python3
"""Finds module cycles in the crates of this workspace.

Rule: the modules that share a parent form a directed acyclic graph. A module represents everything below it, so `a/mod.rs`,
`a/b.rs` and `a/c.rs` are one node beside `d.rs`, and `b` and `c` are two separate nodes inside `a`. A use between a child and its
parent, in either direction, is not an edge: to every other module the two are one.

The check parses the text. It finds `use` declarations, in functions too, and paths that start with `crate`, `super`, `self`, an
imported name or a child module. A name that a module re-exports, also by a glob, counts as the module that defines it. Code
under `#[cfg(test)]` does not count. The check does not find method calls or macro expansions.

    module-cycles.py [crate folder...]     all crates, or those named; exit 1 if there is a cycle
    module-cycles.py --self-test           adds cycles to a generated crate, and must find exactly those
"""

import re
import sys
import tempfile
from pathlib import Path

COMMENT_OR_LITERAL = re.compile(
    r'//[^\n]*|/\*.*?\*/|\bb?r(#*)".*?"\1|\bb?"(?:\\.|[^"\\])*"|"(?:\\.|[^"\\])*"|b?\'(?:\\.[^\']*|[^\'\\])\'', re.DOTALL
)
# serde attributes name functions and modules in string literals.
NAMED_BY_SERDE = re.compile(r'\b(?:with|default|\w+_with|\w+_if|into|from|try_from|remote)\s*=\s*"([\w:]+)"')
RESTRICTED = re.compile(r"\bpub\s*\(\s*in\b[^)]*\)")
TEST_ONLY = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]")
ITEM = re.compile(
    r"(?:\s*#\[[^\]]*\])*\s*(?:pub\b|mod|use|fn|const|static|struct|enum|trait|impl|type|unsafe|extern|async|union|macro_rules)\b"
)
INLINE = re.compile(r"\bmod\s+(\w+)\s*\{")
USE = re.compile(r"\buse\s+([^;]+);")
PATH = re.compile(r"(?<![\w:.])\w+(?:\s*::\s*\w+)+")
DEFINED = re.compile(r"\b(?:mod|fn|const|static|struct|enum|trait|type|union|macro_rules!)\s+(\w+)")
EXPORTED_MACRO = re.compile(r"#\[macro_export[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*macro_rules!\s+(\w+)")


def block_end(text, at):
    """Returns the position after the block whose opening brace is next."""
    depth = 0
    for at in range(at, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0 and text[at] == "}":
            return at + 1
    return len(text)


def item_end(text, at):
    """Returns the position after the item, field, variant, arm or statement that starts here."""
    is_item, depth = ITEM.match(text, at), 0
    for at in range(at, len(text)):
        if text[at] in "({[":
            depth += 1
        elif text[at] in ")}]":
            depth -= 1
            if depth < 0:
                return at
            if depth == 0 and text[at] == "}":
                return at + 1
        elif depth == 0 and (text[at] == ";" or (text[at] == "," and not is_item)):
            return at + 1
    return len(text)


def product_code(text):
    """Returns the code without comments, literals and test-only items."""

    def blank(match):
        return " " if match.group()[0] == "/" else '""'

    text = NAMED_BY_SERDE.sub(lambda match: f"= {match.group(1)}", text)
    text = RESTRICTED.sub("pub", COMMENT_OR_LITERAL.sub(blank, text))
    while match := TEST_ONLY.search(text):
        text = text[: match.start()] + text[item_end(text, match.end()) :]
    return text


def leaves(tree):
    """`a::{b, c::d as e}` as [(['a', 'b'], 'b'), (['a', 'c', 'd'], 'e')]: each path with its local name."""
    if "{" not in tree:
        path, _, name = tree.partition(" as ")
        path = [part.strip() for part in path.split("::") if part.strip()]
        if path and path[-1] == "self":
            path = path[:-1]
        return [(path, name.strip() or path[-1])] if path else []
    head, rest = tree.split("{", 1)
    prefix = [part.strip() for part in head.split("::") if part.strip()]
    inner, depth, parts = rest.rsplit("}", 1)[0], 0, [""]
    for char in inner:
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    found = []
    for part in parts:
        if part.strip() == "self":
            found.append((prefix, prefix[-1]))
        else:
            found += [(prefix + path, name) for path, name in leaves(part)]
    return found


class Crate:
    """The modules of one crate, each named by the tuple of its path; the crate's root is `()`."""

    def __init__(self, folder):
        source = folder / "src"
        self.text, self.file = {}, {}
        for path in sorted(source.rglob("*.rs")):
            name = path.relative_to(source).with_suffix("").parts
            if name[-1] == "mod" or name in (("lib",), ("main",)):
                name = name[:-1]
            self.add(name, path, product_code(path.read_text()))
        # A file that is declared only for tests is no product code.
        for name in sorted(self.text, key=len):
            if name and not re.search(rf"\bmod\s+{name[-1]}\s*;", self.text.get(name[:-1], "")):
                del self.text[name]
        self.defined = {module: set(DEFINED.findall(text)) for module, text in self.text.items()}
        self.names, self.globs = {}, {}
        for module in self.text:
            self.names[module], self.globs[module] = self.imports(module)
        for module, text in self.text.items():
            for macro in EXPORTED_MACRO.findall(text):
                self.names[()].setdefault(macro, [*module, macro])

    def add(self, name, path, text):
        while match := INLINE.search(text):
            end = block_end(text, match.end() - 1)
            self.add((*name, match.group(1)), path, text[match.end() : end - 1])
            text = f"{text[: match.start()]}mod {match.group(1)};{text[end:]}"
        # A crate's library and program share one root here.
        self.text[name] = self.text.get(name, "") + text
        self.file.setdefault(name, path)

    def absolute(self, module, path):
        """Returns a path from the crate's root, or None if it leaves the crate."""
        if path[0] == "crate":
            return path[1:]
        if path[0] not in ("self", "super"):
            return [*module, *path] if (*module, path[0]) in self.text else None
        at = list(module)
        while path and path[0] in ("self", "super"):
            at = at[:-1] if path[0] == "super" else at
            path = path[1:]
        return at + path

    def imports(self, module):
        """Returns the path of each imported name, and the modules that are imported by a glob."""
        names, globs = {}, []
        for declaration in USE.findall(self.text[module]):
            for path, name in leaves(declaration):
                whole = self.absolute(module, path)
                if whole is None:
                    continue
                if name == "*":
                    globs.append(tuple(whole[:-1]))
                else:
                    names[name] = whole
        return names, globs

    def origin(self, path, seen=frozenset()):
        """Returns the module that defines the item of a path, through re-exports."""
        at = next(end for end in range(len(path), -1, -1) if tuple(path[:end]) in self.text)
        module, rest = tuple(path[:at]), path[at:]
        if not rest or (module, rest[0]) in seen:
            return module
        seen |= {(module, rest[0])}
        if rest[0] in self.names[module]:
            return self.origin(self.names[module][rest[0]] + rest[1:], seen)
        if rest[0] not in self.defined[module]:
            for glob in self.globs[module]:
                found = self.origin([*glob, *rest], seen) if glob in self.text else ()
                if found in self.text and rest[0] in self.defined[found]:
                    return found
        return module

    def uses(self, module):
        """Yields the path of each item that a module uses, from the crate's root."""
        text = self.text[module]
        for declaration in USE.findall(text):
            for path, _ in leaves(declaration):
                if whole := self.absolute(module, path):
                    yield whole
        body = USE.sub("", text)
        for match in PATH.findall(body):
            path = [part.strip() for part in match.split("::")]
            if path[0] in self.names[module]:
                yield self.names[module][path[0]] + path[1:]
            elif whole := self.absolute(module, path):
                yield whole
        words = set(re.findall(r"\w+", body))
        for glob in self.globs[module]:
            children = {name[-1] for name in self.text if name and name[:-1] == glob}
            through = {name for deeper in self.globs.get(glob, []) for name in self.defined.get(deeper, ())}
            for name in words & (children | through | set(self.names.get(glob, ()))):
                if name not in self.defined[module]:
                    yield [*glob, name]

    def cycles(self):
        """Yields for each parent the groups of its modules that use each other, and the uses between them."""
        levels = {}
        for user in self.text:
            for path in self.uses(user):
                used, shared = self.origin(path), 0
                while user[shared : shared + 1] == used[shared : shared + 1] != ():
                    shared += 1
                if shared < min(len(user), len(used)):
                    edges = levels.setdefault(user[:shared], {})
                    edges.setdefault((user[shared], used[shared]), []).append((user, "::".join(path)))
        for parent, edges in sorted(levels.items()):
            for group in circles(edges):
                yield parent, group, {tie: uses for tie, uses in edges.items() if set(tie) <= set(group)}


def circles(edges):
    """Returns the groups of nodes that reach each other."""
    after = {}
    for a, b in edges:
        after.setdefault(a, set()).add(b)
    reached = {}
    for start in after:
        seen, todo = set(), [start]
        while todo:
            new = after.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        reached[start] = seen
    groups = {tuple(sorted(m for m in reached[n] if n in reached.get(m, ()))) for n in after if n in reached[n]}
    return sorted(list(group) for group in groups)


def report(folders):
    found = 0
    for folder in folders:
        crate = Crate(folder)
        for parent, group, ties in crate.cycles():
            found += 1
            print(f"{folder.name}: {'::'.join(('crate', *parent))}: {', '.join(group)} use each other")
            for (a, b), uses in sorted(ties.items()):
                user, name = uses[0]
                more = f" and {len(uses) - 1} more" if len(uses) > 1 else ""
                print(f"    {a} -> {b}: {crate.file[user]} names {name}{more}")
    return found


CLEAN = {
    "lib.rs": "mod a;\nmod b;\nmod c;\nmod d;\nmod e;\npub use b::Thing;\n#[cfg(test)]\nmod only;\n",
    "only.rs": "use crate::{b, c, d};\n",
    "a/mod.rs": "mod x;\npub use x::deep;\nuse crate::c::Low;\npub(in crate::b) fn f() {}\n",
    "a/x.rs": "use super::Up;\npub fn deep() {}\n",
    "b.rs": "pub struct Thing;\nfn f() { crate::a::deep(); }\nmod inner { use super::Thing; }\n",
    "c.rs": '// crate::b\nconst S: &str = "crate::b::Thing";\nstruct P { #[cfg(test)] p: crate::b::Thing, q: u8 }\n'
    "#[cfg(test)]\nmod tests { use crate::b::Thing; }\n",
    "d.rs": "pub use crate::c::*;\n",
    "e.rs": "use super::*;\nfn f() { b::f(); }\n",
}
# Each of these lines closes a cycle in one of the modules above.
PLANTED = [
    ("c.rs", "use crate::Thing;", ["a", "b", "c"]),
    ("c.rs", "fn f() { use super::{a as other}; }", ["a", "c"]),
    ("c.rs", "use crate::a;\nfn f() { a::deep() }", ["a", "c"]),
    ("c.rs", "use crate::{\n    e::{\n        f,\n    },\n};", ["a", "b", "c", "e"]),
    ("c.rs", '#[serde(default = "crate::d::low")]\nstruct T;', ["c", "d"]),
    ("c.rs", "mod inner { use super::super::b::Thing; }", ["a", "b", "c"]),
    ("b.rs", "use super::*;\nfn g() { e::f() }", ["b", "e"]),
    ("c.rs", "use crate::*;\nfn g(t: Thing) {}", ["a", "b", "c"]),
    ("c.rs", "macro_rules! m { () => { $crate::b::f() } }", ["a", "b", "c"]),
]


def self_test():
    wrong = 0
    for file, line, expected in [("lib.rs", "", None), *PLANTED]:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in CLEAN.items():
                path = Path(folder, "src", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + (line if name == file else ""))
            found = [(parent, group) for parent, group, _ in Crate(Path(folder)).cycles()]
        if found != ([((), expected)] if expected else []):
            wrong += 1
            print(f"self-test failed: `{line}` in {file} gives {found}, expected {expected}")
    return 1 if wrong else 0


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    folders = [Path(argument) for argument in sys.argv[1:]]
    folders = folders or sorted(manifest.parent for manifest in Path("crates").glob("*/Cargo.toml"))
    return 1 if report(folders) else 0


if __name__ == "__main__":
    sys.exit(main())
