"""Which tests reach a definition: the graph of the repository's names, read from its syntax. Nothing is imported.

    python tests/reach.py transforms/cutting/grid.py [cut_array]

prints the test files that reach a module, or one definition of it, nearest first, and how many tests of each.

A node is a definition at a module's top level, `(path, name)`; `(path, "")` is whatever else runs when the module is
imported. A node leads to all that it names: through imports at the top and inside of functions, through what a package
exports for others (the face of `weightbeam`, too, whose names stand in `HOMES` of `pipelines/api.py`), to the fixtures that a test
asks for, to programs in strings, to modules and scripts that strings name (`-m weightbeam`, `"models.py"`).
A name that is put together, `import_module(f"weightbeam.pipelines.{command}")`, leads to the modules whose names are
words of a string there, or in the tests that lead there: `main(["convert", …])`. The rest is meant to be too much
rather than too little: a class is one node, and whoever makes an object is taken to call all of its methods.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Node = tuple[str, str]
Binding = tuple[str, str | None]  # a module's path, and a name of it, or None: the module itself


def files(root: Path = ROOT) -> list[str]:
    """The paths of all files that git knows or doesn't ignore; links aren't followed."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(name for name in {*names} - {""} if (root / name).is_file())


class Module:
    """What stands in a module: its definitions, its imports, and what else runs when it's imported."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.tree = path, ast.parse(text)
        self.definitions: dict[str, list[ast.stmt]] = defaultdict(list, {"": []})
        self.imports: list[ast.Import | ast.ImportFrom] = []
        self.faces: list[ast.stmt] = []  # imports for type checkers, and what the module has for others
        for node in self.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.imports.append(node)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                self.faces += node.body
            elif not _is_docstring(node) and getattr(node, "name", "") not in ("__getattr__", "__dir__"):
                for name in _defined(node):
                    self.definitions[name].append(node)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement at the top defines; what defines none runs for itself, as does a script's end."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.If) and "__main__" in ast.dump(node.test):
        return ["__main__"]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", ast.Constant(""))]
    names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return names or [""]


class Graph:
    """The graph of all Python files of a repository."""

    def __init__(self, root: Path = ROOT) -> None:
        self.files = files(root)
        self.modules = {path: Module(path, (root / path).read_text()) for path in self.files if path.endswith(".py")}
        self._show_face()
        self.scripts: dict[str, list[str]] = defaultdict(list)
        for path in self.modules:
            self.scripts[path.rpartition("/")[2]].append(path)
        self.edges: dict[Node, set[Node]] = {}
        self.strings: dict[Node, set[str]] = {}
        self.words: dict[Node, set[str]] = {}  # the first of each string
        self.prefixes: dict[Node, set[str]] = {}  # of names that are put together
        for path, module in self.modules.items():
            for name, statements in module.definitions.items():
                _Definition(self, (path, name), statements)

    def _show_face(self) -> None:
        """Has `weightbeam` and the API lead to what their names are fetched from, by the table that says where."""
        homes = self.modules["pipelines/api.py"].definitions["HOMES"] if "pipelines/api.py" in self.modules else []
        for table in (node.value for node in homes if isinstance(node, ast.Assign)):
            for name, home in ast.literal_eval(table).items():
                found = ast.ImportFrom(f"weightbeam.pipelines.{home}", [ast.alias(name)], 0)
                for path in ("pipelines/api.py", "weightbeam/__init__.py"):
                    self.modules[path].faces.append(found)

    @functools.cache  # noqa: B019, one graph lives as long as its program
    def find(self, dotted: str) -> str | None:
        """The file of a module, by the name that it is imported by."""
        inner = dotted.removeprefix("weightbeam.").replace(".", "/")
        places = [inner] if dotted.startswith("weightbeam.") else []
        for base in (*places, dotted.replace(".", "/"), f"tests/{inner}"):
            for path in (f"{base}.py", f"{base}/__init__.py"):
                if path in self.modules:
                    return path
        return None

    @functools.cache  # noqa: B019
    def imported(self, path: str) -> dict[str, Binding]:
        """What the names of a module mean that it imports."""
        module = self.modules[path]
        imports = [node for node in (*module.faces, *module.imports) if isinstance(node, ast.Import | ast.ImportFrom)]
        return dict(item for node in imports for item in self.bindings(node))

    def bindings(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Binding]]:
        """The names that an import brings, where they are of this repository."""
        for alias in node.names:
            if isinstance(node, ast.Import):
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                if found := self.find(name):
                    yield alias.asname or name, (found, None)
            elif found := self.find(f"{node.module}.{alias.name}"):
                yield alias.asname or alias.name, (found, None)
            elif found := self.find(str(node.module)):
                yield alias.asname or alias.name, (found, alias.name)

    def resolve(self, binding: Binding) -> set[Node]:
        """The definitions behind a name, wherever a package has them from; a whole module's: all that it has."""
        path, name = binding
        module = self.modules[path]
        if name is None:
            return {(path, each) for each in module.definitions} | {
                node for each in self.imported(path).values() if each[1] for node in self.resolve(each)
            }
        if name in module.definitions:
            return {(path, name)}
        if name in self.imported(path) and self.imported(path)[name] != binding:
            return self.resolve(self.imported(path)[name])
        return {(path, "")}

    def fixtures(self, path: str) -> Iterator[str]:
        """The files whose fixtures a test file's tests may ask for, nearest first."""
        yield path
        yield from (
            found for folder in Path(path).parents if (found := (folder / "conftest.py").as_posix()) in self.modules
        )

    @functools.cache  # noqa: B019
    def distances(self, start: Node) -> dict[Node, int]:
        """All that a definition leads to, and by how many imports."""
        found = {start: 0}
        words: set[str] = set()
        prefixes: dict[str, int] = {}  # -> how far away
        queue = deque([start])

        def meet(node: Node, distance: int, near: bool) -> None:
            if distance < found.get(node, 1 << 30):
                found[node] = distance
                (queue.appendleft if near else queue.append)(node)

        while queue:
            node = queue.popleft()
            path, here = node[0], found[node]
            for other in self.edges[node]:
                if other not in found or found[other] > here:
                    meet(other, here + (path != other[0]), path == other[0])
            if path.startswith("tests/"):
                words |= self.words[node]
            for prefix in self.prefixes[node]:
                prefixes.setdefault(prefix, here + 1)
                for end in self.ends(prefix, frozenset(self.words[node])):
                    meet(end, here + 1, False)
            if not queue:
                for prefix, distance in prefixes.items():
                    for end in self.ends(prefix, frozenset(words)):
                        meet(end, distance, False)
        return found

    @functools.cache  # noqa: B019
    def ends(self, prefix: str, words: frozenset[str]) -> set[Node]:
        """All of the modules whose names are put together of a prefix and a word."""
        found = filter(None, (self.find(prefix + word) for word in words))
        return {node for path in found for node in self.resolve((path, None))}

    def tests(self) -> list[Node]:
        """All test functions."""
        return [
            (path, name)
            for path, module in self.modules.items()
            if path.startswith("tests/") and path.rpartition("/")[2].startswith("test_")
            for name in module.definitions
            if name.startswith("test_")
        ]

    def reaching(self, wanted: Iterable[Node]) -> dict[Node, int]:
        """The test functions that lead to any of these definitions, and by how many imports, nearest first."""
        wanted = set(wanted)
        found = {}
        for test in self.tests():
            distances = self.distances(test)
            if near := [distances[node] for node in wanted if node in distances]:
                found[test] = min(near)
        return dict(sorted(found.items(), key=lambda item: (item[1], item[0])))

    def nearest(self, wanted: Iterable[Node], durations: Mapping[str, float]) -> list[Node]:
        """The same file by file: the module's own, near ones, and those that are quick, or lead to little, first.

        Args:
          durations: seconds by a file of tests, as far as they are known.
        """
        wanted = set(wanted)
        found = self.reaching(wanted)
        own = {f"test_{path.rpartition('/')[2]}" for path, _ in wanted}
        functions = Counter(file for file, _ in self.tests())

        def cost(test: Node) -> float:
            file = test[0]
            distance = 0 if file.rpartition("/")[2] in own else found[test]
            seconds = durations[file] / functions[file] if file in durations else len(self.distances(test)) / 1000
            return (1 + distance) * (1 + seconds)

        files: dict[str, list[Node]] = defaultdict(list)
        for test in sorted(found, key=cost):
            files[test[0]].append(test)
        return [test for tests in files.values() for test in tests]

    def reading(self, file: str) -> set[Node]:
        """The definitions that name a file which isn't Python, or a folder that it lies in."""
        parts = {*Path(file).parts, file} - {"tests"}
        return {node for node, strings in self.strings.items() if parts & strings}

    def whole(self, path: str) -> set[Node]:
        """All definitions of a file; what runs when it is imported where there is nothing else."""
        return {(path, name) for name in self.modules[path].definitions if name} or {(path, "")}


class _Definition(ast.NodeVisitor):
    """Reads what a definition names into the graph."""

    def __init__(self, graph: Graph, node: Node, statements: list[ast.stmt]) -> None:
        self.graph, self.node, self.path = graph, node, node[0]
        self.edges: set[Node] = {(self.path, "")}
        self.strings: set[str] = set()
        self.prefixes: set[str] = set()
        self.scopes: list[dict[str, Binding | None]] = []  # what functions import, and what is theirs
        graph.edges[node], graph.strings[node], graph.prefixes[node] = self.edges, self.strings, self.prefixes
        if node[1] == "":
            imports = graph.modules[self.path].imports
            self.edges |= {(found, "") for each in imports for _, (found, _) in graph.bindings(each)}
        for statement in statements:
            self.visit(statement)
        self._find_scripts()
        graph.words[node] = {text.partition(" ")[0] for text in self.strings}

    def lead(self, binding: Binding) -> None:
        self.edges |= self.graph.resolve(binding)

    def look_up(self, name: str) -> Binding | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        if name in self.graph.modules[self.path].definitions:
            return self.path, name
        return self.graph.imported(self.path).get(name)

    def visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """A function: its own names hide those of the module; a test's arguments are fixtures."""
        arguments = [arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)]
        own: dict[str, Binding | None] = dict.fromkeys(arguments)
        brought: dict[str, Binding | None] = {}
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                own[each.id] = None
            elif isinstance(each, FUNCTIONS) and each is not node:
                own[each.name] = None
            elif isinstance(each, ast.Import | ast.ImportFrom):
                brought |= self.graph.bindings(each)
        own |= brought
        self.edges |= {(found[0], "") for found in brought.values() if found}
        if self.path.startswith("tests/"):
            self.ask_for(arguments)
        for each in (*getattr(node, "decorator_list", []), *node.args.defaults, *node.args.kw_defaults):
            if each is not None:
                self.visit(each)
        self.scopes.append(own)
        for each in node.body if isinstance(node.body, list) else [node.body]:
            if not _is_docstring(each):
                self.visit(each)
        self.scopes.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_function  # noqa: N815

    def ask_for(self, fixtures: Iterable[str]) -> None:
        for name in fixtures:
            for path in self.graph.fixtures(self.path):
                if name in self.graph.modules[path].definitions:
                    self.edges.add((path, name))
                    break

    def visit_Name(self, node: ast.Name) -> None:
        if node.id == "__file__" and (self.path, "__main__") in self.graph.edges:
            self.edges.add((self.path, "__main__"))
        if isinstance(node.ctx, ast.Load) and (found := self.look_up(node.id)):
            self.lead(found)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """`a.b.c`: as far as `a.b` is a module, what it has of that name."""
        names: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        found = self.look_up(inner.id) if isinstance(inner, ast.Name) else None
        if found is None:
            self.visit(inner)
            return
        for name in reversed(names):
            if found[1] is not None:
                break
            submodule = self.graph.find(".".join((*_dotted(found[0]), name)))
            found = (submodule, None) if submodule else (found[0], name)
        self.lead(found)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).endswith(("usefixtures", "getfixturevalue")):
            self.ask_for(arg.value for arg in node.args if isinstance(arg, ast.Constant))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.take(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [each.value if isinstance(each, ast.Constant) else "_" for each in node.values]
        if len(parts) > 1 and parts[0].endswith(".") and self.graph.find(parts[0][:-1]):
            self.prefixes.add(parts[0])
        self.take("".join(parts))
        for each in node.values:
            if isinstance(each, ast.FormattedValue):
                self.visit(each)

    def take(self, text: str) -> None:
        """A string: a module's name, a script's, or a program."""
        if len(text) < 200:
            self.strings.add(text)
        if "import " in text:
            self._take_program(text)
        elif text.startswith(("weightbeam.", "examples.", "benchmarks.", "deploy.")):
            name, rest = text, None
            while name and not self.graph.find(name):
                name, _, rest = name.rpartition(".")
            if name and name != "weightbeam":
                self.lead((str(self.graph.find(name)), rest))

    def _take_program(self, text: str) -> None:
        try:
            program = ast.parse(text)
        except SyntaxError:
            return
        if any(isinstance(each, ast.Import | ast.ImportFrom) for each in program.body):
            function = ast.parse("def program(): pass").body[0]
            assert isinstance(function, ast.FunctionDef)
            function.body = program.body
            self.visit_function(function)

    def _find_scripts(self) -> None:
        """Scripts by their files' names: beside this file, or in a folder that is named here, too."""
        for name in self.strings & self.graph.scripts.keys():
            for path in self.graph.scripts[name]:
                parent = Path(path).parent
                if parent.as_posix() in ("tests", Path(self.path).parent.as_posix()) or parent.name in self.strings:
                    self.edges |= {(path, each) for each in self.graph.modules[path].definitions}
        if {"-m", "weightbeam"} <= self.strings:
            self.lead(("weightbeam/__main__.py", None))


def _dotted(path: str) -> tuple[str, ...]:
    """The name of a module, of its path."""
    parts = Path(path).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def main(path: str, *names: str) -> None:
    graph = Graph()
    found = graph.reaching({(path, name) for name in names} or graph.whole(path))
    of_files: dict[str, list[int]] = defaultdict(list)
    for (file, _), distance in found.items():
        of_files[file].append(distance)
    for file, distances in of_files.items():
        print(f"{min(distances):3} {len(distances):4} tests of {file}")
    print(f"{len(found)} of {len(graph.tests())} tests in {len(of_files)} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
