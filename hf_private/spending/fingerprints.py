"""Whether a model is still as a run left it: fingerprints of everything that a save writes.

A fingerprint is BLAKE2b over a tensor's type, shape and bytes: any changed element changes it, and no other tensor
with the same fingerprint can be constructed. One CPU core reads about 1 GB per second: half a second for 110 million
float32 weights. Fingerprints are taken when a run ends, at each save, and, of what is not trained, when it starts.
Under FSDP2 each rank takes those of its own shards.

Between two steps of a run something cheaper is compared: torch's counters of in-place writes, which do not see fused
optimizers and writes to `.data`, and the sum of the bits of each trained parameter, which a change of any element
changes. The sums of 110 million float32 weights take 12 ms of one CPU core. Shards of FSDP2 are not compared. The
host reads the result of a comparison of sums once per step, because it waits for the device then.

Copies have no identity and no counters: a copied model is recognised by its fingerprints.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_private.gradients.tensors import BITS, local, parts


@torch.no_grad()
def fingerprint(x: Tensor) -> bytes:
    """16 bytes that identify type, shape and content of a tensor; of this rank's shard, if it is sharded.

    >>> x = torch.zeros(3)
    >>> fingerprint(x) == fingerprint(x.clone()), fingerprint(x) == fingerprint(x.half())
    (True, False)
    """
    own = local(x)
    digest = hashlib.blake2b(f"{own.dtype}{tuple(x.shape)}".encode(), digest_size=16)
    for part in parts(own.detach()):
        digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters as they are between steps: FSDP2 leaves gathered ones, other objects, after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return list(model.parameters())


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a save writes, parameters as objects: the state dict, of a PEFT model that of its adapters."""
    parameters_of(model)
    state = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return state
    part = re.compile(rf"\.(?:{'|'.join(map(re.escape, adapters))})(?:\.|$)")
    return {name: x for name, x in state.items() if x.requires_grad or part.search(name)}


def difference_from_files(model: nn.Module, folder: str | Path) -> str | None:
    """A tensor that is not, up to its type, as the safetensors files of a folder have it; None if all are."""
    adapters = "|".join(map(re.escape, getattr(model, "peft_config", None) or ()))
    part = re.compile(rf"(?:\.modules_to_save)?\.(?:{adapters})(?=\.|$)") if adapters else None  # not in PEFT's files
    tensors = saved_tensors(model)
    found: set[int] = set()  # addresses: only one of two tied weights is saved
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            stored = set(file.keys())
            for name, x in tensors.items():
                key = part.sub("", name) if part else name
                if key in stored and fingerprint(file.get_tensor(key).to(x.dtype)) == fingerprint(x):
                    found.add(x.data_ptr())
    return next((name for name, x in tensors.items() if x.data_ptr() not in found), None)


class Fingerprints:
    """What a model must hold when it is saved: trained parameters as the run left them, the rest as it was before.

    Args:
        model: As it is before the first step.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = saved_tensors(model)
        self.trained = {name for name, x in tensors.items() if x.requires_grad}
        self.buffers = {name: x.detach().clone() for name, x in tensors.items() if not isinstance(x, nn.Parameter)}
        self._probe = Probe({name: p for name, p in model.named_parameters() if p.requires_grad})
        self._before = self._seen = self._now = self._probe.read()
        probed = {id(x) for x in self._probe.tensors.values()}
        # Of what is trained and was changed, nobody needs the fingerprint from before.
        self.start = {
            name: fingerprint(x) for name, x in tensors.items() if name not in self.buffers and id(x) not in probed
        }
        self.expected = {name: digest for name, digest in self.start.items() if name not in self.trained}
        self.ended = False
        self.written_outside: str | None = None

    def note_update(self) -> None:
        """Called after each update of the optimizer."""
        self._seen = self._probe.read()

    def check_update(self) -> list[Tensor]:
        """Find a parameter that something else than the optimizer has written to since `note_update`.

        Returns flags for `note_flags`, on the device: whether there is one that torch's counters do not show.
        """
        self._now = self._probe.read()
        self.written_outside = self.written_outside or self._probe.written(self._now, self._seen)
        return self._probe.flags(self._now, self._seen)

    def note_flags(self, raised: bool) -> None:
        """Called when the flags of `check_update` were read, with whether one of them is set."""
        if raised and self.written_outside is None:
            self.written_outside = self._probe.differing(self._now, self._seen)[0]

    def end(self, model: nn.Module) -> dict[Tensor, bytes]:
        """Fix what the run has left; returns the fingerprints of the parameters that it has trained."""
        tensors = saved_tensors(model)
        self.ended = True
        changed = {id(self._probe.tensors[name]) for name in self._probe.differing(self._probe.read(), self._before)}
        for name in self.trained & tensors.keys():
            self.expected[name] = fingerprint(tensors[name])
            if id(tensors[name]) not in changed:
                self.start.setdefault(name, self.expected[name])
        return {tensors[name]: self.expected[name] for name in self.trained & tensors.keys()}

    def changed_buffer(self, model: nn.Module) -> str | None:
        """A buffer that is not as it was at the start, up to its type; None if there is none."""
        for name, x in saved_tensors(model).items():
            start = self.buffers.get(name)
            if start is not None and fingerprint(x) != fingerprint(start.to(x.dtype)):
                return name
        return None

    def changed(self, model: nn.Module) -> str | None:
        """A tensor that was changed outside of the run, or came to the model since; None if there is none."""
        if self.written_outside is not None:
            return self.written_outside
        for name, x in saved_tensors(model).items():
            if name in self.buffers or (name in self.trained and not self.ended):
                continue
            if name not in self.expected or fingerprint(x) != self.expected[name]:
                return name
        return None


class Look(NamedTuple):
    """What a `Probe` sees: counters of writes and addresses by name, and the sums of bits by device and type."""

    counters: dict[str, tuple[int, int]]
    sums: list[Tensor]


class Probe:
    """A cheap look at tensors, such as the trained parameters of a model, to notice that they were written to.

    Args:
        tensors: By name; they must stay the same objects. Those that are sharded are left out: FSDP2 writes to them.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: x for name, x in tensors.items() if not isinstance(x, DTensor)}
        self._alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, x in self.tensors.items():
            self._alike.setdefault((x.device, BITS[x.element_size()]), []).append(name)

    def read(self) -> Look:
        """Look at the tensors; the host does not wait for the device."""
        counters = {name: (p._version, p.data_ptr()) for name, p in self.tensors.items()}
        sums = []
        for (_, dtype), names in self._alike.items():
            bits = (self.tensors[name].detach().view(dtype) for name in names)
            sums.append(torch.stack([x.sum(dtype=dtype) for x in bits]))  # modulo 2^bits
        return Look(counters, sums)

    @staticmethod
    def written(now: Look, before: Look) -> str | None:
        """A tensor that was written to by the counters, which are on the host."""
        return next((name for name, found in now.counters.items() if found != before.counters[name]), None)

    @staticmethod
    def flags(now: Look, before: Look) -> list[Tensor]:
        """Whether sums differ, as flags on the device for `any_set`."""
        return [(x != y).any() for x, y in zip(now.sums, before.sums, strict=True)]

    def differing(self, now: Look, before: Look) -> list[str]:
        """The tensors whose sums differ; the host waits for the answer."""
        pairs = zip(self._alike.values(), now.sums, before.sums, strict=True)
        return [
            name for names, x, y in pairs for name, odd in zip(names, (x != y).to("cpu").tolist(), strict=True) if odd
        ]


def any_set(flags: Iterable[Tensor]) -> bool:
    """Whether one of these flags is set: one transfer from each device.

    >>> any_set([torch.tensor(False), torch.tensor(True)]), any_set([])
    (True, False)
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        by_device.setdefault(flag.device, []).append(flag)
    return any(bool(torch.stack(some).any()) for some in by_device.values())
