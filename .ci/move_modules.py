"""Moves modules and rewrites every import, dotted name and path that names them.

    python .ci/move_modules.py MOVES

MOVES has a line a module: its old dotted name, a space, its new one. Every other module keeps its
name. Imports and strings get the full name; prose (docstrings and comments) leaves `riffle.` out.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

FOLDERS = ("common", "coordinator", "shuffler", "node_client", "deploy", "experiments", "tests")
TOP = "|".join(FOLDERS)
DOTTED = re.compile(rf"(?<![\w./-])(?:riffle\.)?(?:{TOP})(?:\.\w+)+")
SLASHED = re.compile(rf"(?<![\w./-])(?:{TOP})(?:/\w+)+\.py\b")
TEXT = (".md", ".sh", ".yaml", ".toml", ".ipynb", ".json", "Makefile", "Dockerfile", ".js")


def tracked() -> list[Path]:
    """Files of the checkout."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split("\n") if name and Path(name).is_file()]


def module_of(path: Path) -> str:
    """The dotted name, below `riffle` if not of the tests."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Names:
    """Old and new names of all modules, without `riffle.`."""

    def __init__(self, moves: dict[str, str], modules: set[str]) -> None:
        self.new = {name: moves.get(name, name) for name in modules} | moves

    def longest(self, name: str) -> tuple[str, str] | None:
        """The module that a dotted name begins with, and the rest."""
        bare = name.removeprefix("riffle.").split(".")
        for end in range(len(bare), 0, -1):
            module = ".".join(bare[:end])
            if module in self.new and (end > 1 or len(bare) == 1):
                return module, "".join("." + part for part in bare[end:])
        return None

    def full(self, module: str) -> str:
        """How code names it."""
        new = self.new[module]
        return new if new.startswith("tests") else f"riffle.{new}"

    def code(self, match: re.Match[str]) -> str:
        """The name in code."""
        found = self.longest(match.group())
        return match.group() if found is None else self.full(found[0]) + found[1]

    def prose(self, match: re.Match[str]) -> str:
        """The name in a docstring or comment."""
        found = self.longest(match.group())
        return match.group() if found is None else self.new[found[0]] + found[1]

    def path(self, match: re.Match[str]) -> str:
        """The path in a text."""
        module = match.group().removesuffix(".py").replace("/", ".")
        new = self.new.get(module)
        return match.group() if new is None else new.replace(".", "/") + ".py"


def imports(node: ast.ImportFrom | ast.Import, names: Names) -> list[str] | None:
    """The statement anew, or None where it stays as it is."""
    if isinstance(node, ast.Import):
        texts = []
        for alias in node.names:
            found = (
                names.longest(alias.name)
                if alias.name.split(".")[0] in (*FOLDERS, "riffle")
                else None
            )
            texts.append(
                (names.full(found[0]) if found else alias.name)
                + (f" as {alias.asname}" if alias.asname else "")
            )
        return ["import " + ", ".join(texts)]
    module = (node.module or "").removeprefix("riffle.")
    if node.level or (module.split(".")[0] not in FOLDERS and module != "riffle"):
        return None
    plain: list[str] = []
    lines: list[str] = []
    for alias in node.names:
        old = f"{module}.{alias.name}"
        if old in names.new:
            parent, _, leaf = names.full(old).rpartition(".")
            asname = alias.asname or (alias.name if leaf != alias.name else None)
            lines.append(f"from {parent} import {leaf}" + (f" as {asname}" if asname else ""))
        else:
            plain.append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
    if plain:
        package = names.full(module) if module in names.new else node.module
        lines.append(f"from {package} import ({', '.join(plain)})")
    return lines


def docstrings(tree: ast.Module) -> set[tuple[int, int]]:
    """Where bare strings begin."""
    return {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def rewrite_python(text: str, names: Names) -> str:
    """One file's source."""
    tree = ast.parse(text)
    prose = docstrings(tree)
    lines = text.splitlines(keepends=True)
    edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    spans = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            new = imports(node, names)
            if new is None:
                continue
            start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
            spans.append((node.lineno, node.end_lineno))
            tail = lines[node.end_lineno - 1][node.end_col_offset :]
            inner = "".join(lines[node.lineno - 1 : node.end_lineno])
            note = re.search(r"#.*", inner[: len(inner) - len(tail)])
            text_new = ("\n" + " " * node.col_offset).join(new)
            if note and node.end_lineno != node.lineno:
                text_new += "  " + note.group()
            edits.append((start, end, text_new))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if any(a <= token.start[0] <= b for a, b in spans):
            continue
        if token.type == tokenize.COMMENT or (
            token.type == tokenize.STRING and token.start in prose
        ):
            new_text = DOTTED.sub(names.prose, token.string)
        elif token.type == tokenize.STRING:
            new_text = re.sub(
                rf"(?m)(\bfrom |\bimport )({TOP})(?=[ .])", r"\1riffle.\2", token.string
            )
            new_text = new_text.replace("riffle.tests", "tests")
            new_text = DOTTED.sub(names.code, new_text)
        else:
            continue
        new_text = SLASHED.sub(names.path, new_text)
        if new_text != token.string:
            edits.append((token.start, token.end, new_text))
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))

    def at(position: tuple[int, int], byte: bool) -> int:
        line, column = position
        if byte:
            column = len(lines[line - 1].encode()[:column].decode())
        return offsets[line - 1] + column

    for start, end, new_text in sorted(edits, reverse=True):
        is_import = any(a == start[0] for a, _ in spans)
        text = text[: at(start, is_import)] + new_text + text[at(end, is_import) :]
    return text


def merge(moves: dict[str, str]) -> None:
    """Move files; those with one new name are joined, what is imported first."""
    targets: dict[str, list[str]] = {}
    for old, new in moves.items():
        targets.setdefault(new, []).append(old)
    texts = {
        old: Path(old.replace(".", "/")).with_suffix(".py").read_text()
        for old in moves
        if Path(old.replace(".", "/")).with_suffix(".py").is_file()
    }
    for new, olds in targets.items():
        path = Path(new.replace(".", "/")).with_suffix(".py")
        files = [Path(old.replace(".", "/")).with_suffix(".py") for old in olds]
        base = files[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        if base != path:
            subprocess.run(["git", "mv", "-f", str(base), str(path)], check=True)
        for other in files[1:]:
            if other != path and other.exists():
                subprocess.run(["git", "rm", "-qf", str(other)], check=True)
        deeper = new.count(".") - olds[0].count(".")
        text = joined([texts[old] for old in olds], new, olds)
        path.write_text(
            re.sub(
                r"(Path\(__file__\)\.(?:resolve\(\)\.)?parents\[)(\d+)\]",
                lambda m, by=deeper: f"{m.group(1)}{int(m.group(2)) + by}]",
                text,
            )
        )


def joined(texts: list[str], new: str, olds: list[str]) -> str:
    """One source from several; the first one's docstring leads."""
    if len(texts) == 1:
        return texts[0]
    own = new if new.startswith("tests") else f"riffle.{new}"
    docs, imports_, bodies, seen = [], [], [], {}
    for text, old in zip(texts, olds, strict=True):
        tree, lines = ast.parse(text), text.splitlines(keepends=True)
        head = tree.body[0]
        docs.append("".join(lines[head.lineno - 1 : head.end_lineno]))
        last = head.end_lineno
        for node in tree.body[1:]:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                break
            last = node.end_lineno
            if isinstance(node, ast.ImportFrom) and node.module == own:
                continue
            source = "".join(lines[node.lineno - 1 : node.end_lineno])
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and f"{node.module}.{node.names[0].name}" == own
            ):
                print("imports itself as a module:", new, old, source.strip())
            imports_.append(source)
        body = "".join(lines[last:])
        for node in tree.body:
            names_ = (
                [node.name]
                if hasattr(node, "name")
                else [
                    t.id
                    for t in getattr(node, "targets", [getattr(node, "target", None)])
                    if isinstance(t, ast.Name)
                ]
            )
            for name in names_:
                if name in seen:
                    print("collision:", new, name, "of", seen[name], "and", old)
                    if name.startswith("_"):
                        body = re.sub(rf"\b{name}\b", f"{name}_of_{old.split('.')[-1]}", body)
                else:
                    seen[name] = old
        bodies.append(body.strip("\n"))
    extra = "".join("# MERGED: " + d.replace("\n", "\n# ") + "\n" for d in docs[1:])
    future = "from __future__ import annotations\n"
    order = [i for i in imports_ if i != future]
    top = future if len(order) < len(imports_) else ""
    return (
        docs[0] + "\n" + top + "".join(order) + "\n" + extra + "\n" + "\n\n\n".join(bodies) + "\n"
    )


def main() -> None:
    """Rewrite first, then move."""
    moves = dict(
        line.split() for line in Path(sys.argv[1]).read_text().splitlines() if line.strip()
    )
    files = tracked()
    own = [f for f in files if f.suffix == ".py" and f.parts[0] in FOLDERS]
    names = Names(moves, {module_of(f) for f in own})
    for file in files:
        if file.name == "move_modules.py" or "vendor" in file.parts or file.is_symlink():
            continue
        if file.suffix == ".py":
            old = file.read_text()
            new = rewrite_python(old, names)
        elif file.suffix in TEXT or file.name in TEXT:
            old = file.read_text()
            new = SLASHED.sub(names.path, DOTTED.sub(names.code, old))
            if file.suffix in (".md", ".sh", ".ipynb"):
                new = re.sub(
                    rf"(?m)((?:^|\")\s*(?:from|import) )({TOP})(?=[ .])", r"\1riffle.\2", new
                )
                new = new.replace("riffle.tests", "tests")
        else:
            continue
        if new != old:
            file.write_text(new)
    merge(moves)


main()
