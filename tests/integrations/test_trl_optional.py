"""TRL is optional: without it everything else works; methods without a private version are refused by name."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import BitsAndBytesConfig

import hf_private
from tests.support import chats, training, zoo

WITHOUT_TRL = """
import sys
sys.modules["trl"] = None  # as if it were not installed
from importlib.util import find_spec
import importlib.util
importlib.util.find_spec = lambda name, *rest: None if name == "trl" else find_spec(name, *rest)
import hf_private
for name in hf_private.__all__:
    getattr(hf_private, name)
import hf_private.trainer.private_mixin, hf_private.cli.main, hf_private.integrations
try:
    from hf_private.integrations.trl import DPSFTTrainer
except ImportError as error:
    print(error)
"""


def test_without_trl_the_message_names_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRL], capture_output=True, text=True, check=True)
    assert "`trl` must be installed" in done.stdout and "hf-private[trl]" in done.stdout


def importing(*libraries: str) -> set[tuple[str, ...]]:
    """The parts of the package that import one of them."""
    package = Path(hf_private.__file__).parent
    starts = tuple(f"{word} {library}" for library in libraries for word in ("import", "from"))
    return {
        path.relative_to(package).parts[:2]
        for path in package.rglob("*.py")
        if any(line.lstrip().startswith(starts) for line in path.read_text().splitlines())
    }


def test_nothing_else_imports_trl() -> None:
    """Only the integration does, and only when it is asked for."""
    assert importing("trl") == {("integrations", "trl")}


def test_nothing_imports_the_libraries_of_quantised_bases() -> None:
    """Transformers does when it loads such a model; the tests of these say which extra they need."""
    assert importing("bitsandbytes", "torchao") == set()


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
@pytest.mark.parametrize("name", ["DPSFTTrainer", "DPDPOTrainer", "DPRewardTrainer"])
def test_a_quantised_base_without_its_library_names_the_extra(tmp_path: Path, name: str) -> None:
    trl = pytest.importorskip("hf_private.integrations.trl", reason="needs the extra `trl`")
    zoo.small("llama").save_pretrained(tmp_path / "base")
    chats.tokenizer().save_pretrained(tmp_path / "base")
    cls = getattr(trl, name)
    quantised = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    args = cls.arguments_class(str(tmp_path / "out"), use_cpu=True, bf16=False, model_init_kwargs=quantised)
    with pytest.raises(ImportError, match=r"`bitsandbytes` .*hf-private\[quantized\]"):
        cls(
            model=str(tmp_path / "base"),
            args=args,
            train_dataset=chats.made("pair" if name != "DPSFTTrainer" else "chat"),
            dp_config=hf_private.DPConfig(noise_multiplier=1.0),
        )


def test_rollouts_of_vllm_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the extra `trl`")
    from hf_private.integrations.trl.settings import SHARED, refuse_settings

    args = training.arguments(tmp_path)
    refuse_settings(args, SHARED)
    args.use_vllm = True
    with pytest.raises(ValueError, match="`use_vllm` = True .*rollouts"):
        refuse_settings(args, SHARED)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DPGRPOTrainer", "`GRPO` .*normalised over the batch.*rollouts"),
        ("DPRLOOTrainer", "`RLOO` .*normalised over the batch.*rollouts"),
        ("DPOnlineDPOTrainer", "`OnlineDPO` .*rollouts"),
        ("DPKTOTrainer", "`KTO` .*over the whole batch"),
    ],
)
def test_methods_that_cannot_be_private_are_refused_with_the_reason(name: str, reason: str) -> None:
    trl = pytest.importorskip("hf_private.integrations.trl", reason="needs the extra `trl`")
    with pytest.raises(NotImplementedError, match=reason):
        getattr(trl, name)
    with pytest.raises(AttributeError):
        _ = trl.DPNothingTrainer


def test_online_methods_are_refused_for_any_trainer_class(tmp_path: Path) -> None:
    class Online(training.TrainingArguments):  # as GRPOConfig
        num_generations: int = 8

    def arguments(folder: Any, **settings: Any) -> Any:
        base = training.arguments(folder, **settings)
        base.__class__ = Online
        return base

    with pytest.raises(ValueError, match="`num_generations` = 8"):
        training.trainer(tmp_path, zoo.small("bert"), make_args=arguments)
