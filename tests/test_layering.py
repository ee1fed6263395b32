"""The import rule, read from the source: import only downward, and keep the big libraries out of the private core."""

import ast
import re
from pathlib import Path

import pytest

import hf_private

PACKAGE = Path(hf_private.__file__).parent

ROOMS = {
    0: {"validate", "keystream", "prv", "accountants"},
    1: {"persample", "clipping", "noise", "precision", "sampling", "accounting"},
    2: {"ledger", "layers", "methods"},
    3: {"bookkeeping"},
    4: {"mechanism", "ranks", "selfcheck", "shards"},
    5: {
        *(
            "config",
            "matching",
            "targets",
            "diagnostics",
            "heads",
            "independence",
            "losses",
            "adapters",
            "inheritance",
            "lineage",
            "memory",
            "synthetic",
            "checkpoint",
            "collating",
        ),
        *("anchor_config", "anchor_data"),
        *("guards", "cards", "composition", "curve", "record", "release", "schema", "snapshot", "verification"),
    },
    6: {"callbacks", "continuing", "facts", "publishing"},
    7: {"trainer"},
    8: {"commands", "cli", "audit", "audit_canaries", "audit_mia", "audit_step"},
}
FLOOR = {room: floor for floor, rooms in ROOMS.items() for room in rooms}

LIBRARIES = {  # library -> the rooms that may import it
    **dict.fromkeys(
        ("transformers", "accelerate", "peft", "huggingface_hub"), ROOMS[5] | ROOMS[6] | ROOMS[7] | ROOMS[8]
    ),
    **dict.fromkeys(("dp_accounting", "prv_accountant"), {"accountants", "prv"}),
}
EXCEPTIONS = {("layers", "transformers.pytorch_utils")}  # the rule for Hugging Face's Conv1D has to name the class


def imports(source: str, module: str) -> set[str]:
    """Full names of everything that a module imports, wherever in the file, relative imports resolved."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) + "." if node.level else ""
            origin = (base + (node.module or "")).rstrip(".")
            # `from hf_private import accounting` names a room, `from hf_private.accounting import Event` a part
            found |= {f"{origin}.{alias.name}" for alias in node.names} if origin == "hf_private" else {origin}
    return found


def violations(source: str, module: str) -> list[str]:
    """What in this module's imports breaks the rule."""
    room = module.split(".")[1]
    wrong = []
    for name in imports(source, module):
        head, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if head == "hf_private" and other in FLOOR:
            upward = FLOOR[other] > FLOOR[room]
            sibling = FLOOR[other] == FLOOR[room] and FLOOR[room] in (1, 2)
            if other != room and (upward or sibling):
                wrong.append(f"{module} imports {name}")
        elif head in LIBRARIES and room not in LIBRARIES[head] and (room, name) not in EXCEPTIONS:
            wrong.append(f"{module} imports {name}")
    return wrong


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(("hf_private", *parts)).removesuffix(".__init__")
        if name != "hf_private":
            found.append((name, path))
    return found


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_downward(name: str, path: Path) -> None:
    assert name.split(".")[1] in FLOOR, f"{name} has no room: give it one in ROOMS"
    module = f"{name}.__init__" if path.name == "__init__.py" else name
    assert violations(path.read_text(), module) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hf_private.noise", "from hf_private.accounting import Event"),
        ("hf_private.noise", "import hf_private.trainer"),
        ("hf_private.noise", "from hf_private import mechanism"),
        ("hf_private.noise", "from . import sampling"),
        ("hf_private.methods.full", "from ..mechanism import Mechanism"),
        ("hf_private.methods.full", "from hf_private.layers import rule"),
        ("hf_private.mechanism", "def f():\n    from transformers import Trainer"),
        ("hf_private.ledger", "import dp_accounting"),
        ("hf_private.layers.linear", "from transformers import AutoModel"),
    ],
)
def test_the_rule_sees_wrong_imports(module: str, source: str) -> None:
    assert violations(source, module) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hf_private.noise", "from hf_private.validate import positive"),
        (
            "hf_private.methods.full",
            "from hf_private.persample import Outer\nfrom hf_private.methods.base import Method",
        ),
        ("hf_private.layers.linear", "from transformers.pytorch_utils import Conv1D"),
        ("hf_private.trainer", "from transformers import Trainer\nfrom hf_private.mechanism import Mechanism"),
        ("hf_private.ledger", "from hf_private.accounting import Event"),
    ],
)
def test_the_rule_lets_right_imports_pass(module: str, source: str) -> None:
    assert violations(source, module) == []


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_files_stay_readable(name: str, path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400, f"{name} has outgrown one file"


def test_contributing_shows_every_room() -> None:
    """The table in CONTRIBUTING.md is the one that is held here."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    shown: dict[int, set[str]] = {}
    for floor, files in re.findall(r"^\| (\d) \| (.*?) \|", text, re.MULTILINE):
        shown.setdefault(int(floor), set()).update(re.findall(r"`(\w+)/?`", files))
    assert shown == ROOMS
