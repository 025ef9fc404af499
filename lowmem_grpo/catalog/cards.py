"""Which device the work runs on, what it has, and the dtype that suits it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lowmem_grpo.errors import ConfigError, nearest
from lowmem_grpo.types import Card

__all__ = ["CARDS", "CardSpec", "card_named", "compute_dtype", "detect_card", "known_card"]


@dataclass(frozen=True, slots=True)
class CardSpec:
    """The data-sheet figures of a card: memory in GiB, bandwidth in 10^9 bytes/s, compute capability, arithmetic (dense
    16-bit products with 32-bit sums) in 10^12 operations/s, board power in watts.

    `model` is the name as the driver says it, in lower case and without maker, series and memory size. GeForce cards
    sum in 32 bits at half the rate of their 16-bit figure, the GTX 1660 at that of its 32-bit units. `ecc` marks GDDR
    memory that comes with error correction switched on.

    >>> CARDS["t4-16gb"].bandwidth_gb_s, CARDS["t4-16gb"].tflops
    (320.0, 65.0)
    """

    model: str
    memory_gib: int
    bandwidth_gb_s: float
    capability: tuple[int, int]
    tflops: float
    watts: float
    ecc: bool = False

    @property
    def usable_bytes(self) -> int:
        """What a program can have of the memory when nothing big runs beside it (see `_usable_bytes`).

        >>> round(CARDS["rtx3060-12gb"].usable_bytes / 2**30, 2), round(CARDS["t4-16gb"].usable_bytes / 2**30, 2)
        (11.62, 14.57)
        """
        return _usable_bytes(self.memory_gib * 15 / 16 if self.ecc else self.memory_gib)


CARDS: Mapping[str, CardSpec] = {
    "rtx3060laptop-6gb": CardSpec("rtx 3060 laptop", 6, 336.0, (8, 6), 26.1, 115.0),
    "rtx2060-6gb": CardSpec("rtx 2060", 6, 336.0, (7, 5), 25.8, 160.0),
    "gtx1660-6gb": CardSpec("gtx 1660", 6, 192.0, (7, 5), 5.0, 120.0),
    "rtx4060-8gb": CardSpec("rtx 4060", 8, 272.0, (8, 9), 30.2, 115.0),
    "rtx4060laptop-8gb": CardSpec("rtx 4060 laptop", 8, 256.0, (8, 9), 29.1, 115.0),
    "rtx3070-8gb": CardSpec("rtx 3070", 8, 448.0, (8, 6), 40.6, 220.0),
    "rtx3060ti-8gb": CardSpec("rtx 3060 ti", 8, 448.0, (8, 6), 32.4, 200.0),
    "rtx4060ti-8gb": CardSpec("rtx 4060 ti", 8, 288.0, (8, 9), 44.1, 160.0),
    "rtx3050-8gb": CardSpec("rtx 3050", 8, 224.0, (8, 6), 18.2, 130.0),
    "rtx4070laptop-8gb": CardSpec("rtx 4070 laptop", 8, 256.0, (8, 9), 40.1, 115.0),
    "rtx3070ti-8gb": CardSpec("rtx 3070 ti", 8, 608.0, (8, 6), 43.5, 290.0),
    "rtx5060-8gb": CardSpec("rtx 5060", 8, 448.0, (12, 0), 38.4, 145.0),
    "rtx2070-8gb": CardSpec("rtx 2070", 8, 448.0, (7, 5), 29.9, 175.0),
    "rtx3080-10gb": CardSpec("rtx 3080", 10, 760.0, (8, 6), 59.5, 320.0),
    "rtx2080ti-11gb": CardSpec("rtx 2080 ti", 11, 616.0, (7, 5), 53.8, 250.0),
    "rtx3060-12gb": CardSpec("rtx 3060", 12, 360.0, (8, 6), 25.5, 170.0),
    "rtx4070-12gb": CardSpec("rtx 4070", 12, 504.0, (8, 9), 58.3, 200.0),
    "rtx4070super-12gb": CardSpec("rtx 4070 super", 12, 504.0, (8, 9), 71.0, 220.0),
    "rtx4070ti-12gb": CardSpec("rtx 4070 ti", 12, 504.0, (8, 9), 80.2, 285.0),
    "rtx3080ti-12gb": CardSpec("rtx 3080 ti", 12, 912.0, (8, 6), 68.2, 350.0),
    "rtx5070-12gb": CardSpec("rtx 5070", 12, 672.0, (12, 0), 61.7, 250.0),
    "rtx4060ti-16gb": CardSpec("rtx 4060 ti", 16, 288.0, (8, 9), 44.1, 165.0),
    "rtx5060ti-16gb": CardSpec("rtx 5060 ti", 16, 448.0, (12, 0), 47.4, 180.0),
    "rtx4070tisuper-16gb": CardSpec("rtx 4070 ti super", 16, 672.0, (8, 9), 88.2, 285.0),
    "rtx4080-16gb": CardSpec("rtx 4080", 16, 717.0, (8, 9), 97.5, 320.0),
    "rtx4080super-16gb": CardSpec("rtx 4080 super", 16, 736.0, (8, 9), 104.4, 320.0),
    "rtx5070ti-16gb": CardSpec("rtx 5070 ti", 16, 896.0, (12, 0), 87.9, 300.0),
    "rtx5080-16gb": CardSpec("rtx 5080", 16, 960.0, (12, 0), 112.6, 360.0),
    "t4-16gb": CardSpec("t4", 16, 320.0, (7, 5), 65.0, 70.0, ecc=True),
    "v100-16gb": CardSpec("v100", 16, 900.0, (7, 0), 125.0, 300.0),
    "rtx3090-24gb": CardSpec("rtx 3090", 24, 936.0, (8, 6), 71.0, 350.0),
    "rtx4090-24gb": CardSpec("rtx 4090", 24, 1008.0, (8, 9), 165.2, 450.0),
    "rtx3090ti-24gb": CardSpec("rtx 3090 ti", 24, 1008.0, (8, 6), 80.0, 450.0),
    "a10-24gb": CardSpec("a10", 24, 600.0, (8, 6), 125.0, 150.0, ecc=True),
    "l4-24gb": CardSpec("l4", 24, 300.0, (8, 9), 121.0, 72.0, ecc=True),
    "rtx5090-32gb": CardSpec("rtx 5090", 32, 1792.0, (12, 0), 209.5, 575.0),
    "a100-40gb": CardSpec("a100", 40, 1555.0, (8, 0), 312.0, 400.0),
    "rtxa6000-48gb": CardSpec("rtx a6000", 48, 768.0, (8, 6), 154.8, 300.0),
    "l40s-48gb": CardSpec("l40s", 48, 864.0, (8, 9), 362.0, 350.0, ecc=True),
    "a100-80gb": CardSpec("a100", 80, 2039.0, (8, 0), 312.0, 400.0),
    "h100-80gb": CardSpec("h100", 80, 3350.0, (9, 0), 989.0, 700.0),
    "h200-141gb": CardSpec("h200", 141, 4800.0, (9, 0), 989.0, 700.0),
}
"""Cards by slug, figures of the makers' public data sheets; by memory, and of one size the commonest at home first."""

_MAKERS = {"nvidia", "geforce", "tesla", "gpu", "pcie", "sxm2", "sxm4", "sxm5", "hbm3", "hbm3e"}
_GIB = 2**30


def known_card(name: str, memory_bytes: int) -> CardSpec | None:
    """The table's entry for a name as torch or the driver gives it; of several memory sizes the nearest.

    A size more than a tenth away is another product (a 3060 also exists with 8 GB and a narrower bus): None then.

    >>> known_card("NVIDIA GeForce RTX 4060 Ti", 16 << 30).memory_gib
    16
    """
    model = " ".join(word for word in _words(name) if not re.fullmatch(r"\d+gb", word))
    gib = memory_bytes / _GIB
    fits = [
        card for card in CARDS.values() if card.model == model and abs(card.memory_gib - gib) < card.memory_gib / 10
    ]
    return min(fits, key=lambda card: abs(card.memory_gib - gib), default=None)


def card_named(text: str) -> Card:
    """A card to plan for, present or not: a slug of `CARDS`, or a bare size in GB.

    A slug is taken in any case, with spaces, with the maker's name, and without its memory or its "rtx" where that
    leaves one card. Of a bare size the rest is what the slowest card of that size in the table (by bandwidth, of
    capability 8.0 on) has; when there is none, the slowest of the nearest size. `memory_bytes` is what the driver
    leaves usable (`CardSpec.usable_bytes`), never what is free on this machine: `detect_card` says that.

    >>> card_named("RTX 3060 12 GB").name, card_named("12gb").name, card_named("12").bandwidth_bytes_per_s
    ('rtx3060-12gb', 'a 12 GB card', 360000000000.0)

    Raises:
        ConfigError: an unknown card, or several of that name; the sentence names the nearest.
    """
    plain = "".join(_words(text)).replace("gib", "gb")
    size = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)(gb|g)?", plain)
    if size and float(size[1]) >= 1:
        return _card_of_size(float(size[1]))
    found = _slugs_named(plain) or _slugs_named(f"rtx{plain}")
    if len(found) == 1:
        spec = CARDS[found[0]]
        return _card(found[0], "cuda", spec.capability, spec.usable_bytes, spec)
    if found:
        raise ConfigError(f"There are several cards called {text!r}; write {' or '.join(found)}.")
    slugs = {slug.replace("-", ""): slug for slug in CARDS}
    close = slugs.get(nearest(plain, slugs))
    raise ConfigError(
        f"There is no card called {text!r}"
        + (f" (did you mean {close}?)" if close else "")
        + "; write a card as rtx3060-12gb, or its memory as 12gb."
    )


def _words(name: str) -> list[str]:
    """The lower-case words of a card's name without those of the maker."""
    return [word for word in re.split(r"[\s\-_]+", name.lower()) if word not in _MAKERS]


def _slugs_named(plain: str) -> list[str]:
    """The slugs that these letters and digits mean, with the memory size or without."""
    return [slug for slug in CARDS if plain in (slug.replace("-", ""), slug.partition("-")[0])]


def _card_of_size(gib: float) -> Card:
    """A card of that memory, as fast as the slowest of the nearest size that computes in bfloat16."""
    modern = [spec for spec in CARDS.values() if spec.capability >= (8, 0)]
    spec = min(modern, key=lambda spec: (abs(spec.memory_gib - gib), spec.bandwidth_gb_s))
    article = "an" if re.match(r"8|1[18]\b", f"{gib:g}") else "a"
    return _card(f"{article} {gib:g} GB card", "cuda", spec.capability, _usable_bytes(gib), spec)


def _usable_bytes(gib: float) -> int:
    """What the driver and a desktop leave of a card's memory: an assumption, 1.5 % and 0.2 GiB less.

    It lies a little under the totals that torch reports on such cards (23.64 of 24 GiB, 31.37 of 32, 15.6 of 16).
    """
    return int((gib * 0.985 - 0.2) * _GIB)


def _card(name: str, device: str, capability: tuple[int, int], memory_bytes: int, spec: CardSpec | None) -> Card:
    if spec is None:
        return Card(name, device, capability, memory_bytes)
    return Card(name, device, capability, memory_bytes, spec.bandwidth_gb_s * 1e9, spec.tflops * 1e12, spec.watts)


def detect_card(device: str = "auto") -> Card:
    """The device to work on: "auto" (a GPU when there is one), "cpu", "cuda" or "cuda:<number>".

    Memory is what is free now: the operating system's available memory, or the driver's free memory of the GPU.

    Raises:
        ConfigError: an unknown device, "cuda" without a usable GPU, or "auto" on a machine whose GPU this torch
            cannot use (training on the CPU instead would take a hundred times as long without a word).
    """
    if device == "cpu":
        return _cpu()
    if device != "auto" and not re.fullmatch(r"cuda(:\d+)?", device):
        close = nearest(device, ("auto", "cpu", "cuda"))
        raise ConfigError(
            f"device is {device!r}; write auto, cpu, cuda or cuda:0" + (f" (did you mean {close}?)." if close else ".")
        )
    import torch

    if torch.cuda.is_available():
        return _cuda(device)
    if gpu := _gpu_seen():
        raise ConfigError(
            f"This machine has a GPU ({gpu}) that this torch ({torch.__version__}) cannot use: "
            f"{_torch_advice(torch.__version__, torch.version.cuda)}, or set device=cpu to use the CPU on purpose."
        )
    if device != "auto":
        raise ConfigError(f"device is {device!r} but no NVIDIA GPU is visible here; set device=cpu or device=auto.")
    return _cpu()


def compute_dtype(card: Card, requested: str = "auto") -> tuple[str, str | None]:
    """(dtype to compute in, warning or None): float32 on a CPU, bfloat16 from capability 8 on, else float16.

    >>> compute_dtype(Card("Tesla T4", "cuda", (7, 5), 15 << 30), "bfloat16")[0]
    'float16'
    """
    choices = ("auto", "float32", "bfloat16", "float16")
    if requested not in choices:
        close = nearest(requested, choices)
        hint = f" (did you mean {close}?)" if close else ""
        raise ConfigError(f"model.compute_dtype is {requested!r}; choose one of {', '.join(choices)}{hint}.")
    if card.device == "cpu":
        return ("float32" if requested == "auto" else requested), None
    has_bfloat16 = card.capability >= (8, 0)
    if requested == "auto":
        return ("bfloat16" if has_bfloat16 else "float16"), None
    if requested == "bfloat16" and not has_bfloat16:
        capability = ".".join(map(str, card.capability))
        return "float16", f"{card.name} (capability {capability}) has no bfloat16 arithmetic; float16 is used instead."
    return requested, None


def _cpu() -> Card:
    import platform

    import psutil

    return Card(platform.processor() or "cpu", "cpu", (0, 0), psutil.virtual_memory().available)


def _cuda(device: str) -> Card:
    import torch

    index = int(device.partition(":")[2] or torch.cuda.current_device())
    if index >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device is {device!r} but the GPUs here are cuda:0 to cuda:{count - 1}.")
    taken_bytes = _taken_bytes(index)
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    if not _has_kernels(capability, torch.cuda.get_arch_list()):
        raise ConfigError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, for which this torch "
            f"({torch.__version__}) has no kernels: {_torch_advice(torch.__version__, torch.version.cuda)}, or set "
            "device=cpu to use the CPU on purpose."
        )
    free, total = torch.cuda.mem_get_info(index)
    if taken_bytes is not None:
        free = total - taken_bytes
    return _card(name, "cuda" if device == "auto" else device, capability, free, known_card(name, total))


def _taken_bytes(index: int) -> int | None:
    """What others hold of a GPU, None where the driver's library does not say. Asked before CUDA has a context in this
    process, since the plan counts the context itself."""
    import pynvml
    import torch

    try:
        return torch.cuda.device_memory_used(index)
    except (pynvml.NVMLError, ImportError, RuntimeError):
        return None


def _has_kernels(capability: tuple[int, int], built_for: Iterable[str]) -> bool:
    """True when code for this capability is in the build: same major and an equal or lower minor, or older PTX.

    >>> _has_kernels((8, 9), ["sm_80", "sm_90"]), _has_kernels((6, 1), ["sm_75", "sm_80"])
    (True, False)
    """
    for arch in built_for:
        kind, _, digits = arch.partition("_")
        number = re.match(r"\d+", digits)
        major, minor = divmod(int(number[0]), 10) if number else (0, 0)
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if kind == "compute" and (major, minor) <= capability:
            return True
    return False


def _gpu_seen() -> str:
    """The name of an NVIDIA GPU that the driver shows, "" when there is none or CUDA_VISIBLE_DEVICES hides them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return ""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return _gpu_seen_without_nvml()
    try:
        if pynvml.nvmlDeviceGetCount() == 0:
            return ""
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    finally:
        pynvml.nvmlShutdown()


def _gpu_seen_without_nvml() -> str:
    cards = Path("/proc/driver/nvidia/gpus")
    if cards.is_dir() and any(cards.iterdir()):
        return "seen in /proc/driver/nvidia"
    if tool := shutil.which("nvidia-smi"):
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
        return listed.stdout.splitlines()[0] if listed.returncode == 0 and listed.stdout else ""
    return ""


def _torch_advice(version: str, cuda: str | None) -> str:
    """What to do so that torch can use the GPU."""
    if cuda:
        return f"it is built for CUDA {cuda}, so update the NVIDIA driver or install a torch built for this card"
    if sys.platform == "win32":
        return "it is a CPU build; install a CUDA build with the line that pytorch.org/get-started prints"
    plain = version.partition("+")[0]
    return f"it is a CPU build; run `{sys.executable} -m pip install --force-reinstall torch=={plain}`"
