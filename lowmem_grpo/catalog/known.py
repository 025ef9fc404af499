"""Models whose sizes are known here, so that a plan needs no network: short name -> repository, licence, config.

A config in this table holds what sizes depend on. Numbers that change no size (frequencies of rotary positions, ids of
special tokens) are left out, so it is for planning and not for loading. `tests/test_shapes.py` compares each model
with the parameter count that its makers publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowmem_grpo.catalog.embedded import SMOLLM2_135M
from lowmem_grpo.catalog.shapes import ModelShape, model_shape

__all__ = ["KNOWN", "KnownModel", "known_model"]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model of the table; `licence` is the identifier on the hub, `download_bytes` what its weights weigh there.

    >>> KNOWN["qwen2.5-1.5b-instruct"].shape.layers
    28
    """

    repo: str
    licence: str
    download_bytes: int
    config: Mapping[str, Any] = field(repr=False, hash=False)

    @property
    def shape(self) -> ModelShape:
        """The sizes, under the repository's name."""
        return model_shape(self.config, self.repo)


def known_model(name: str) -> KnownModel | None:
    """The table's entry for a short name or a repository, upper or lower case; None when it has none.

    >>> known_model("Qwen/qwen3-8b").licence, known_model("qwen3-9b")
    ('apache-2.0', None)
    """
    known = KNOWN.get(name.rsplit("/", 1)[-1].lower())
    return known if known and name.lower() in (_short(known.repo), known.repo.lower()) else None


def _short(repo: str) -> str:
    return repo.rsplit("/", 1)[-1].lower()


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the models of one size have in common, whatever they were trained on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int | None = None

    def config(self, family: str, tied: bool, positions: int, **more: Any) -> dict[str, Any]:
        """The config.json of a model of this size."""
        return {
            "model_type": family,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            **({"head_dim": self.head_dim} if self.head_dim else {}),
            "vocab_size": self.vocab,
            "tie_word_embeddings": tied,
            "max_position_embeddings": positions,
            **more,
        }


def _known(repo: str, licence: str, config: Mapping[str, Any], stored_head: bool = False) -> KnownModel:
    """An entry with 16-bit weights; `stored_head` says that the files hold a tied head a second time."""
    shape = model_shape(config, repo)
    return KnownModel(repo, licence, 2 * (shape.parameters + stored_head * shape.embedding_parameters), config)


def _llama(repo: str, licence: str, sizes: _Sizes, *, tied: bool, positions: int) -> KnownModel:
    return _known(repo, licence, sizes.config("llama", tied, positions))


def _mistral(repo: str, sizes: _Sizes, *, positions: int) -> KnownModel:
    return _known(repo, "apache-2.0", sizes.config("mistral", False, positions, sliding_window=None))


def _qwen2(
    repo: str, size: str, licence: str = "apache-2.0", *, positions: int = 32768, tied: bool | None = None
) -> KnownModel:
    """A model in one of the sizes of Qwen2.5, whose smaller ones tie the head unless `tied` says otherwise."""
    tied = size in ("0.5B", "1.5B", "3B") if tied is None else tied
    return _known(repo, licence, _QWEN25[size].config("qwen2", tied, positions))


def _qwen3(repo: str, size: str, *, positions: int = 40960) -> KnownModel:
    config = _QWEN3[size].config("qwen3", size in ("0.6B", "1.7B", "4B"), positions)
    return _known(repo, "apache-2.0", config, stored_head=size in ("0.6B", "1.7B"))


def _phi3(repo: str, sizes: _Sizes, *, tied: bool = False, positions: int, **more: Any) -> KnownModel:
    return _known(repo, "mit", sizes.config("phi3", tied, positions, **more))


def _gemma2(repo: str, sizes: _Sizes) -> KnownModel:
    return _known(repo, "gemma", sizes.config("gemma2", True, 8192, sliding_window=4096))


def _gemma3(repo: str, sizes: _Sizes) -> KnownModel:
    return _known(repo, "gemma", sizes.config("gemma3_text", True, 32768, sliding_window=512))


_QWEN25 = {
    "0.5B": _Sizes(24, 896, 4864, 14, 2, 151936),
    "1.5B": _Sizes(28, 1536, 8960, 12, 2, 151936),
    "3B": _Sizes(36, 2048, 11008, 16, 2, 151936),
    "7B": _Sizes(28, 3584, 18944, 28, 4, 152064),
    "14B": _Sizes(48, 5120, 13824, 40, 8, 152064),
    "32B": _Sizes(64, 5120, 27648, 40, 8, 152064),
    "72B": _Sizes(80, 8192, 29568, 64, 8, 152064),
}

_QWEN3 = {
    "0.6B": _Sizes(28, 1024, 3072, 16, 8, 151936, 128),
    "1.7B": _Sizes(28, 2048, 6144, 16, 8, 151936, 128),
    "4B": _Sizes(36, 2560, 9728, 32, 8, 151936, 128),
    "8B": _Sizes(36, 4096, 12288, 32, 8, 151936, 128),
    "14B": _Sizes(40, 5120, 17408, 40, 8, 151936, 128),
    "32B": _Sizes(64, 5120, 25600, 64, 8, 151936, 128),
}

_LLAMA_8B = _Sizes(32, 4096, 14336, 32, 8, 128256, 128)

_LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48},
}
"""The long context of the small Phi models, with stand-ins for its 48 factors."""

_MODELS = (
    KnownModel(SMOLLM2_135M.name, "apache-2.0", SMOLLM2_135M.download_bytes, SMOLLM2_135M.config),
    _llama(
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        "apache-2.0",
        _Sizes(32, 960, 2560, 15, 5, 49152, 64),
        tied=True,
        positions=8192,
    ),
    _llama(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "apache-2.0",
        _Sizes(24, 2048, 8192, 32, 32, 49152, 64),
        tied=True,
        positions=8192,
    ),
    _known(
        "HuggingFaceTB/SmolLM3-3B",
        "apache-2.0",
        _Sizes(36, 2048, 11008, 16, 4, 128256).config("smollm3", True, 65536),
    ),
    _qwen2("Qwen/Qwen2.5-0.5B-Instruct", "0.5B"),
    _qwen2("Qwen/Qwen2.5-1.5B-Instruct", "1.5B"),
    _qwen2("Qwen/Qwen2.5-3B-Instruct", "3B", "qwen-research"),
    _qwen2("Qwen/Qwen2.5-7B-Instruct", "7B"),
    _qwen2("Qwen/Qwen2.5-14B-Instruct", "14B"),
    _qwen2("Qwen/Qwen2.5-32B-Instruct", "32B"),
    _qwen2("Qwen/Qwen2.5-72B-Instruct", "72B", "qwen"),
    _qwen2("Qwen/Qwen2.5-Coder-1.5B-Instruct", "1.5B"),
    _qwen2("Qwen/Qwen2.5-Coder-3B-Instruct", "3B", "qwen-research"),
    _qwen2("Qwen/Qwen2.5-Coder-7B-Instruct", "7B"),
    _qwen2("Qwen/Qwen2.5-Coder-14B-Instruct", "14B"),
    _qwen2("Qwen/Qwen2.5-Coder-32B-Instruct", "32B"),
    _qwen2("Qwen/Qwen2.5-Math-1.5B-Instruct", "1.5B", positions=4096),
    _qwen2("Qwen/Qwen2.5-Math-7B-Instruct", "7B", positions=4096),
    _qwen3("Qwen/Qwen3-0.6B", "0.6B"),
    _qwen3("Qwen/Qwen3-1.7B", "1.7B"),
    _qwen3("Qwen/Qwen3-4B", "4B"),
    _qwen3("Qwen/Qwen3-4B-Instruct-2507", "4B", positions=262144),
    _qwen3("Qwen/Qwen3-8B", "8B"),
    _qwen3("Qwen/Qwen3-14B", "14B"),
    _qwen3("Qwen/Qwen3-32B", "32B"),
    _qwen2("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "1.5B", "mit", positions=131072, tied=False),
    _qwen2("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "7B", "mit", positions=131072),
    _qwen2("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "14B", "mit", positions=131072),
    _qwen2("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "32B", "mit", positions=131072),
    _llama("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "mit", _LLAMA_8B, tied=False, positions=131072),
    _llama(
        "meta-llama/Llama-3.2-1B-Instruct",
        "llama3.2",
        _Sizes(16, 2048, 8192, 32, 8, 128256, 64),
        tied=True,
        positions=131072,
    ),
    _llama(
        "meta-llama/Llama-3.2-3B-Instruct",
        "llama3.2",
        _Sizes(28, 3072, 8192, 24, 8, 128256, 128),
        tied=True,
        positions=131072,
    ),
    _llama("meta-llama/Llama-3.1-8B-Instruct", "llama3.1", _LLAMA_8B, tied=False, positions=131072),
    _llama(
        "meta-llama/Llama-3.3-70B-Instruct",
        "llama3.3",
        _Sizes(80, 8192, 28672, 64, 8, 128256, 128),
        tied=False,
        positions=131072,
    ),
    _llama(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "apache-2.0",
        _Sizes(22, 2048, 5632, 32, 4, 32000),
        tied=False,
        positions=2048,
    ),
    _mistral("mistralai/Mistral-7B-Instruct-v0.3", _Sizes(32, 4096, 14336, 32, 8, 32768), positions=32768),
    _mistral("mistralai/Mistral-Nemo-Instruct-2407", _Sizes(40, 5120, 14336, 32, 8, 131072, 128), positions=131072),
    _mistral("mistralai/Mistral-Small-24B-Instruct-2501", _Sizes(40, 5120, 32768, 32, 8, 131072, 128), positions=32768),
    _phi3("microsoft/Phi-3.5-mini-instruct", _Sizes(32, 3072, 8192, 32, 32, 32064), positions=131072, **_LONGROPE),
    _phi3("microsoft/phi-4", _Sizes(40, 5120, 17920, 40, 10, 100352), positions=16384, sliding_window=None),
    _phi3(
        "microsoft/Phi-4-mini-instruct",
        _Sizes(32, 3072, 8192, 24, 8, 200064),
        tied=True,
        positions=131072,
        partial_rotary_factor=0.75,
        **_LONGROPE,
    ),
    _gemma2("google/gemma-2-2b-it", _Sizes(26, 2304, 9216, 8, 4, 256000, 256)),
    _gemma2("google/gemma-2-9b-it", _Sizes(42, 3584, 14336, 16, 8, 256000, 256)),
    _gemma2("google/gemma-2-27b-it", _Sizes(46, 4608, 36864, 32, 16, 256000, 128)),
    _gemma3("google/gemma-3-270m-it", _Sizes(18, 640, 2048, 4, 1, 262144, 256)),
    _gemma3("google/gemma-3-1b-it", _Sizes(26, 1152, 6912, 4, 1, 262144, 256)),
)

KNOWN: Mapping[str, KnownModel] = {_short(known.repo): known for known in _MODELS}
"""Short name (lower case) -> model."""
