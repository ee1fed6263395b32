"""The import rule, read from the source: each package imports only those before it in `ORDER`.

Large libraries stay out of the private core, so that an auditor can read it without them.
"""

import ast
from pathlib import Path

import pytest

import hf_private

PACKAGE = Path(hf_private.__file__).parent

ORDER = (
    "_validate",
    "_files",
    "_html",
    "randomness",
    "accounting",
    "gradients",
    "distributed",
    "mechanism",
    "tasks",
    "methods",
    "spending",
    "publishing",
    "config",
    "trainer",
    "integrations",
    "audit",
    "cli",
)

# Library -> the only parts of the package that may import it.
HUGGING_FACE = ("tasks", "methods", "spending", "publishing", "config", "trainer", "integrations", "audit", "cli")
LIBRARIES = {
    "transformers": (*HUGGING_FACE, "gradients.layers"),  # the rules name one class, Conv1D
    "accelerate": HUGGING_FACE,
    "peft": HUGGING_FACE,
    "huggingface_hub": HUGGING_FACE,
    "dp_accounting": ("accounting",),
    "prv_accountant": ("accounting",),
}
# The methods' maths is as much part of the core as the engine.
PURE = ("methods.carriers.method", "methods.carriers.lowrank", "methods.gep.method", "methods.subspace")


def imported(source: str, module: str) -> set[str]:
    """Full names of everything that a module imports, wherever in the file, relative imports resolved."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) + "." if node.level else ""
            origin = (base + (node.module or "")).rstrip(".")
            # `from hf_private import config` names a module, `from hf_private.config import DPConfig` a part of one
            found |= {f"{origin}.{alias.name}" for alias in node.names} if origin == "hf_private" else {origin}
    return found


def violations(source: str, module: str) -> list[str]:
    """Which of a module's imports break the rule. `module` ends in `.__init__` for a package's own file."""
    inside = module.removeprefix("hf_private.")
    package = inside.split(".")[0]
    wrong = []
    for name in sorted(imported(source, module)):
        library, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if library == "hf_private" and other in ORDER:
            allowed = ORDER.index(other) <= ORDER.index(package)
        elif library in LIBRARIES:
            places = LIBRARIES[library]
            allowed = inside not in PURE and any(inside == p or inside.startswith(f"{p}.") for p in places)
        else:
            allowed = True
        if not allowed:
            wrong.append(f"{module} imports {name}")
    return wrong


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(("hf_private", *path.relative_to(PACKAGE).with_suffix("").parts))
        if name != "hf_private.__init__":
            found.append((name, path))
    return found


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_follow_the_order(name: str, path: Path) -> None:
    assert name.split(".")[1] in ORDER, f"{name} is in no package of ORDER"
    assert violations(path.read_text(), name) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hf_private.accounting.events", "from hf_private.mechanism.noise import NoiseSource"),
        ("hf_private.mechanism.noise", "import hf_private.trainer"),
        ("hf_private.mechanism.noise", "from hf_private import config"),
        ("hf_private.gradients.method", "from ..mechanism.step import Mechanism"),
        ("hf_private.gradients.layers.linear", "from ...mechanism.step import Mechanism"),
        ("hf_private.methods.registry", "from hf_private.config import DPConfig"),
        ("hf_private.methods.carriers.lowrank", "import peft"),
        ("hf_private.mechanism.step", "def f():\n    from transformers import Trainer"),
        ("hf_private.gradients.selfcheck", "from transformers import AutoModel"),
        ("hf_private.spending.ledger", "import dp_accounting"),
    ],
)
def test_forbidden_imports_are_found(module: str, source: str) -> None:
    assert violations(source, module) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hf_private.mechanism.noise", "from hf_private._validate import positive"),
        (
            "hf_private.methods.carriers.method",
            "from hf_private.gradients.persample import Outer\nfrom . import lowrank",
        ),
        ("hf_private.gradients.layers.linear", "from transformers.pytorch_utils import Conv1D"),
        ("hf_private.trainer.trainer", "from transformers import Trainer\nfrom hf_private.config import DPConfig"),
        ("hf_private.spending.ledger", "from hf_private.accounting.events import Event"),
    ],
)
def test_allowed_imports_pass(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_the_root_folder_holds_few_files() -> None:
    """Packages in the root folder, and few files beside them."""
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert sum(path.is_file() for path in entries) <= 8
