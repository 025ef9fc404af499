"""One copy of the weights: a frozen base, quantised to NF4 or not, with a LoRA adapter.

With the adapter on it is the policy, with the adapter off (or a frozen second adapter on, when the run continues
from an adapter) it is the reference, and the same live modules are what the sampler runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lowmem_grpo.attention import Layout, PackedLayout, capped, kernels_of, use_layouts
from lowmem_grpo.catalog.folder import context_length
from lowmem_grpo.errors import ModelError
from lowmem_grpo.memory.decoded import hold_decoded_weights, linear_4bit_layers
from lowmem_grpo.memory.embedding import offload_embedding
from lowmem_grpo.memory.head import chunked_logprobs
from lowmem_grpo.memory.lora import LeanLora
from lowmem_grpo.memory.offload import ActivationOffload
from lowmem_grpo.memory.tiled import tile_mlps
from lowmem_grpo.quiet import quiet_loading
from lowmem_grpo.types import Card, GroupSpan, PackedMicroBatch

__all__ = ["LoraSpec", "ModelSpec", "Policy", "check_adapter_folder", "load_base", "load_policy", "load_tokenizer"]

POLICY_ADAPTER = "default"
REFERENCE_ADAPTER = "reference"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which base, and in which form it is held.

    `path` is a local folder. `weights` is "4bit" (decode at every call), "dequantized" (keep the decoded values) or
    "auto" (dequantized on a CPU). `base_name` and `base_revision` are what the adapter config records. The last four
    are those of `MemorySettings`.

    >>> ModelSpec(Path("/models/smollm2"), base_name="smollm2-135m-instruct").quantization
    'nf4'
    """

    path: Path
    base_name: str
    base_revision: str | None = None
    quantization: str = "nf4"
    prequantized: bool = False
    weights: str = "auto"
    compute_dtype: str = "float32"
    activation_checkpointing: bool = True
    offload_activations: bool = False
    offload_embeddings: bool = False
    mlp_tile_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The adapter: all linear layers by default, fp32 master weights, no dropout.

    >>> LoraSpec(rank=16, alpha=32).target_modules
    'all-linear'
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: str | tuple[str, ...] = "all-linear"
    continue_from: Path | None = None
    seed: int = 0


class Policy:
    """The live model as sampler, policy and reference, with the few operations the stages need.

    `model` is a peft model whose attention and adapter layers are the lean ones; called without a layout it computes
    what it always did. `end_ids` are all ids that end an answer. `attention` is "sdpa", "flash_attention_2", or "auto"
    for flash-attn where it is installed and the card can use it. `dtype` is that of activations, keys and values.
    `device` is where tensors lie, another than the card's only where the card is imagined.
    """

    def __init__(
        self,
        model: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        card: Card,
        *,
        base_name: str,
        base_revision: str | None = None,
        activation_checkpointing: bool = True,
        offload_activations: bool = False,
        mlp_tile_tokens: int = 0,
        attention: str = "auto",
        device: torch.device | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.card = card
        self.base_name = base_name
        self.base_revision = base_revision
        self.device = device or torch.device(card.device)
        self._base: PreTrainedModel = model.get_base_model()
        self._decoder: nn.Module = self._base.get_decoder()
        self._head: nn.Linear = self._base.get_output_embeddings()
        self._config = self._base.config.get_text_config(decoder=True)
        self._softcap: float | None = getattr(self._config, "final_logit_softcapping", None)
        self.dtype: torch.dtype = self._head.weight.dtype
        self._kernels = kernels_of(card, self.dtype, attention)
        self._lora_layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        self._has_reference_adapter = REFERENCE_ADAPTER in model.peft_config
        self.end_ids = end_token_ids(self._base, tokenizer)
        remove_dropout(model)
        use_layouts(self._base)
        self._adapters = LeanLora(model, self.dtype)
        if mlp_tile_tokens:
            tile_mlps(model, mlp_tile_tokens)
        if activation_checkpointing:
            self._base.activation_checkpointing_enable()
            # With an adapter attached that makes every embedded token a leaf with a gradient, for re-entrant
            # checkpoints; these do not need it.
            self._base.disable_input_require_grads()
        self._offload = ActivationOffload(self._decoder) if offload_activations else None
        self.sampling_mode()
        self.check_head()

    # Modes: checkpointing acts in train mode only, and there it would switch the KV cache off.

    def sampling_mode(self) -> None:
        """Eval mode: the KV cache works, nothing is recomputed."""
        self.model.eval()

    def update_mode(self) -> None:
        """Train mode with every dropout at 0: activation checkpointing is active."""
        self.model.train()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the model is the reference: adapter off, or the frozen start adapter when the run continues one.

        Only the layers' own flags change (peft's context manager walks every module). Forward only: a backward
        through a checkpointed forward made inside must not happen after leaving.
        """
        before = [(layer._active_adapter, layer._disable_adapters) for layer in self._lora_layers]
        for layer in self._lora_layers:
            if self._has_reference_adapter:
                layer._active_adapter = [REFERENCE_ADAPTER]
            else:
                layer._disable_adapters = True
        try:
            yield
        finally:
            for layer, (active, disabled) in zip(self._lora_layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled

    # Forward.

    @property
    def on_gpu(self) -> bool:
        """Whether the card is a GPU, which an imagined one is though its tensors lie on the CPU."""
        return self.card.device != "cpu"

    @property
    def max_positions(self) -> int:
        """The context length of the base, in tokens; see `catalog.folder.context_length`."""
        positions = context_length(self._config.to_dict())
        assert positions is not None, "every supported family has max_position_embeddings"
        return positions

    @property
    def hidden_width(self) -> int:
        """H, the width of a hidden state."""
        return int(self._config.hidden_size)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Layers, key-value heads and the width of a head: what a token's keys and values are made of."""
        config = self._config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(config.num_hidden_layers), int(config.num_key_value_heads), int(width)

    def packed_layout(self, spans: Sequence[GroupSpan]) -> PackedLayout:
        """The attention within a packed sequence made of `spans`."""
        return PackedLayout(spans, self.device, self._kernels)

    def hidden_states(self, input_ids_BT: torch.Tensor, position_ids_BT: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Last hidden states (B, T, H); the layout says who sees whom and where keys and values go."""
        return self._decoder(
            input_ids=input_ids_BT,
            # Four axes mean to transformers that the mask is made already; the layout does not look at it.
            attention_mask=torch.empty(1, 1, 1, 1, device=self.device),
            position_ids=position_ids_BT,
            use_cache=False,
            layout=layout,
        ).last_hidden_state

    def logits(self, hidden_B_H: torch.Tensor) -> torch.Tensor:
        """Head on a few hidden states: (B, V) in at least fp32."""
        logits = capped(self._head(hidden_B_H), self._softcap)
        return logits if logits.dtype == torch.float64 else logits.float()

    def logprobs(
        self, micro: PackedMicroBatch, *, temperature: float, head_chunk_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the sampled tokens at `temperature`, with gradient, and their detached entropies.

        Both are (B, T), zero off `micro.mask_BT`. The head runs in chunks of `head_chunk_tokens`, once for each
        different predictor; the logits of the micro-batch never exist at once.
        """
        rows_U, index_M = micro.predictors_M.unique(return_inverse=True)
        layout = self.packed_layout(micro.spans)
        with self._saving():
            hidden_N_H = self.hidden_states(micro.input_ids_N[None], micro.position_ids_N[None], layout)[0]
        logprobs_M, entropy_M = chunked_logprobs(
            hidden_N_H[rows_U],
            self._head.weight,
            micro.targets_M,
            index_M=index_M,
            temperature=temperature,
            chunk_tokens=head_chunk_tokens,
            bias_V=self._head.bias,
            softcap=self._softcap,
        )
        zeros_BT = torch.zeros(micro.mask_BT.shape, dtype=logprobs_M.dtype, device=self.device)
        return zeros_BT.masked_scatter(micro.mask_BT, logprobs_M), zeros_BT.masked_scatter(micro.mask_BT, entropy_M)

    def _saving(self) -> AbstractContextManager[None]:
        """Around a forward: where what it keeps for the backward waits."""
        return self._offload.saving() if self._offload is not None and torch.is_grad_enabled() else nullcontext()

    # The adapter.

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> fp32 master weight of the policy adapter, in a stable order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """The policy adapter in peft's names, on the CPU, as copies."""
        state = get_peft_model_state_dict(self.model, adapter_name=POLICY_ADAPTER, save_embedding_layers=False)
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}

    def load_adapter_state(self, state: dict[str, torch.Tensor]) -> None:
        """Copy a state made by `adapter_state` into the live adapter, in place."""
        result = set_peft_model_state_dict(self.model, state, adapter_name=POLICY_ADAPTER)
        if result.unexpected_keys:
            raise ModelError(f"The adapter does not belong to this model: it has {result.unexpected_keys[0]!r}.")
        self.refresh_adapter()

    def adapter_tensors(self) -> list[torch.Tensor]:
        """All that is held of the adapters: fp32 masters, a frozen reference, the copies that are multiplied with."""
        masters = [parameter for name, parameter in self.model.named_parameters() if ".lora_" in name]
        return [*masters, *self._adapters.copies]

    def refresh_adapter(self) -> None:
        """Bring the 16-bit copy that is multiplied with up to the fp32 masters: after every change of them."""
        self._adapters.refresh()

    def adapter_config(self) -> dict[str, Any]:
        """The policy adapter's peft config as JSON values, with the base and its revision recorded."""
        config = self.model.peft_config[POLICY_ADAPTER].to_dict()
        config |= {
            "base_model_name_or_path": self.base_name,
            "revision": self.base_revision,
            "inference_mode": True,
            "task_type": "CAUSAL_LM",
        }
        return json.loads(
            json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
        )

    @torch.no_grad()
    def check_head(self) -> None:
        """Compare head(hidden) with the model's own logits on four tokens.

        Raises ModelError when they differ: some families scale or cap their logits, and log-probs computed without
        that would be of another policy.
        """
        ids_BT = torch.arange(4, device=self.device)[None] + 3
        own = self._base(input_ids=ids_BT, use_cache=False).logits.double()
        layout = self.packed_layout([GroupSpan(0, 4, ())])
        ours = self.logits(self.hidden_states(ids_BT, torch.arange(4, device=self.device)[None], layout)).double()
        if not torch.isfinite(own).all():
            raise ModelError(f"{self.base_name} gives non-finite logits; its weights are damaged or overflow.")
        gap, scale = (own - ours).abs().max().item(), own.abs().max().item()
        if gap > 1e-3 * max(scale, 1.0):
            raise ModelError(
                f"The logits of {self.base_name} are not its head times its hidden states (they differ by {gap:.3g}): "
                "this kind of model is not supported."
            )


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises ModelError when it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(path, padding_side="left")
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"The tokenizer in {path} cannot be read: {first_line(error)}") from error


def load_base(spec: ModelSpec, card: Card) -> PreTrainedModel:
    """Load the frozen base onto the card.

    NF4 with double quantisation; embeddings, norms and head stay in the compute dtype. Raises ModelError when the
    folder cannot be read.
    """
    dtype = DTYPES[spec.compute_dtype]
    quantization = None
    if spec.quantization == "nf4" and not spec.prequantized:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    try:
        config = AutoConfig.from_pretrained(spec.path)
        for name in ("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"):
            if getattr(config, name, 0):
                setattr(config, name, 0.0)
        model = AutoModelForCausalLM.from_pretrained(
            spec.path,
            config=config,
            dtype=dtype,
            quantization_config=quantization,
            device_map={"": card.device},
            use_safetensors=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(f"The model in {spec.path} cannot be loaded: {first_line(error)}") from error
    model.requires_grad_(False)
    _settle_4bit_layers(model, spec, card, dtype)
    return model


def _settle_4bit_layers(model: PreTrainedModel, spec: ModelSpec, card: Card, dtype: torch.dtype) -> None:
    layers = linear_4bit_layers(model)
    for layer in layers:
        # On CPUs with AVX512-BF16 the layer would repack its weights at the first no-grad call, and training would
        # then call an operator that has no gradient.
        layer.support_avx512bf16_for_cpu = False
        layer.compute_dtype = dtype
        layer.compute_type_is_set = True
    hold = spec.weights == "dequantized" or (spec.weights == "auto" and card.device == "cpu")
    if layers and hold:
        hold_decoded_weights(model, dtype)


def load_policy(
    spec: ModelSpec, lora: LoraSpec, card: Card, tokenizer: PreTrainedTokenizerBase, *, attention: str = "auto"
) -> Policy:
    """Base plus adapter, ready to sample. Raises ModelError with one sentence."""
    with quiet_loading():
        base = load_base(spec, card)
        if spec.offload_embeddings:
            offload_embedding(base, torch.device(card.device))
        model = attach_adapter(base, lora)
    if card.device != "cpu":
        torch.cuda.empty_cache()  # what only loading needed would stay reserved, in pieces of the wrong size
    return Policy(
        model,
        tokenizer,
        card,
        base_name=spec.base_name,
        base_revision=spec.base_revision,
        activation_checkpointing=spec.activation_checkpointing,
        offload_activations=spec.offload_activations,
        mlp_tile_tokens=spec.mlp_tile_tokens,
        attention=attention,
    )


def attach_adapter(base: PreTrainedModel, lora: LoraSpec) -> PeftModel:
    """A fresh adapter (B = 0, so the policy starts as the base), or the one in `lora.continue_from` twice:
    trainable, and frozen as the reference.

    The initial weights depend on `lora.seed` alone. Raises ModelError.
    """
    if lora.continue_from is not None:
        return _continue_adapter(base, lora.continue_from)
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM"
    )
    head = base.get_output_embeddings()
    if not isinstance(targets, str) and any(
        m is head and name.endswith(tuple(targets)) for name, m in base.named_modules()
    ):
        raise ModelError("lora.target_modules names the head; an adapter on the head is not supported.")
    torch.manual_seed(lora.seed)
    try:
        model = get_peft_model(base, config)
    except ValueError as error:
        names = sorted({name.rsplit(".", 1)[-1] for name, m in base.named_modules() if isinstance(m, nn.Linear)})
        raise ModelError(
            f"lora.target_modules {targets!r} matches no layer; this model has {', '.join(names)}."
        ) from error
    return model


def _continue_adapter(base: PreTrainedModel, folder: Path) -> PeftModel:
    check_adapter_folder(folder)
    try:
        model = PeftModel.from_pretrained(base, folder, adapter_name=POLICY_ADAPTER, is_trainable=True)
        model.load_adapter(folder, REFERENCE_ADAPTER, is_trainable=False)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"The adapter in {folder} does not fit this model: {first_line(error)}") from error
    model.set_adapter(POLICY_ADAPTER)
    # Both in fp32: the policy multiplies with its fp32 masters, and only then is the KL of the first step exactly 0.
    for name, parameter in model.named_parameters():
        if f".{REFERENCE_ADAPTER}." in name:
            parameter.requires_grad_(False)
    return model


def check_adapter_folder(folder: Path) -> None:
    """Raise ModelError unless `folder` holds a LoRA adapter in peft's safe format; needs no model."""
    config_file = folder / "adapter_config.json"
    if not config_file.is_file():
        raise ModelError(f"lora.continue_from: {folder} has no adapter_config.json; name a folder written by peft.")
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"lora.continue_from: {folder} has no adapter_model.safetensors; other formats are not read.")
    kind = json.loads(config_file.read_text(encoding="utf-8")).get("peft_type")
    if kind != "LORA":
        raise ModelError(f"lora.continue_from: {folder} holds an adapter of kind {kind!r}, and only LORA can go on.")


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends an answer: the tokenizer's end token and those of the generation config.

    Ids outside the vocabulary are left out. Raises ModelError when none remains.
    """
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    listed = generation.eos_token_id if generation is not None else None
    ids = set(listed if isinstance(listed, list | tuple) else [listed]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ModelError("The model names no end token, so no answer could ever end.")
    words = model.get_output_embeddings().weight.shape[0]
    if not (reachable := frozenset(int(i) for i in ids if 0 <= i < words)):
        raise ModelError(
            f"The end token {min(ids)} is outside the model's vocabulary of {words}, so no answer could ever end: "
            "the tokenizer belongs to another model."
        )
    return reachable


def remove_dropout(model: nn.Module) -> None:
    """Set every dropout to 0, of the base and of an adapter's config: sampler and trainer must be one policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if getattr(module, "attention_dropout", 0):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 (torch types every attribute as a tensor or module)


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
