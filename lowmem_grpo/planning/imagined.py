"""A card and a model that are not there: fake tensors that only have sizes, for the real code to run on.

Fake CPU tensors stand for tensors on the card (a fake `cuda` device aborts the process where torch has no CUDA). Float
tensors and packed bytes are fake; indices and masks are real, so that the bookkeeping of sampler and update, whose
shapes depend on their values, runs as it is. A number read out of a fake tensor is 0.

What a GPU does differently from a CPU is imagined here, and only here: which attention kernel runs, and what kernels
use inside.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from lowmem_grpo import attention
from lowmem_grpo.catalog.shapes import ModelShape
from lowmem_grpo.memory.live import tensors_in
from lowmem_grpo.types import Card

__all__ = ["StandIn4bit", "imagined_base", "imagined_card", "workspace_of"]

BLOCK = 64
"""Values that share a scale in NF4 (QLoRA, arXiv 2305.14314)."""

NESTED_BLOCK = 256
"""Scales that share a scale of their own."""

FUSED_ROWS = 4
"""Rows up to which bitsandbytes multiplies with the packed weight on every card; above, some cards decode it first."""

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_UNINITIALISED = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)


@contextlib.contextmanager
def imagined_card(card: Card) -> Iterator[None]:
    """Inside, what is made of floats or bytes is fake, and attention runs as on `card`."""
    kernel = F.scaled_dot_product_attention if card.device == "cpu" else _CardAttention(card)
    # `Module.to` exchanges fake parameters with converted ones, which torch refuses where anything refers to them.
    with (
        mock.patch.object(torch.utils, "swap_tensors", _take_over),
        mock.patch.object(attention, "causal_lower_right", _real_causal_lower_right),
        mock.patch.object(F, "scaled_dot_product_attention", kernel),
        FakeTensorMode(allow_non_fake_inputs=True),
        _RealBookkeeping(),
    ):
        yield


def _real_causal_lower_right(*sizes: int) -> CausalBias:
    """This kind of tensor, which only says its sizes, cannot be made of a fake one."""
    with _disable_current_modes():
        return causal_lower_right(*sizes)


def _take_over(parameter: Tensor, converted: Tensor) -> None:
    if parameter.dtype != converted.dtype:
        parameter.data = converted.data


def imagined_base(shape: ModelShape, dtype: torch.dtype, *, quantized: bool) -> PreTrainedModel:
    """The frozen base of `shape` as `model.load_base` would return it; call it inside `imagined_card`."""
    values = dict(shape.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # which is part of what was just left out
    model.requires_grad_(False)
    if quantized:
        _quantize(model, dtype)
    return model


def _quantize(model: PreTrainedModel, dtype: torch.dtype) -> None:
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, StandIn4bit(child, dtype))
    model.is_loaded_in_4bit = True  # what peft asks


class StandIn4bit(Linear4bit):
    """A 4-bit layer of the shape of `linear` with the buffers of bitsandbytes' own, whose parameter class takes no fake
    tensor. The products are bitsandbytes' own."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        values = linear.in_features * linear.out_features
        blocks = -(-values // BLOCK)
        weight = nn.Parameter(torch.empty((values + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
        weight.quant_state = QuantState(  # type: ignore[attr-defined]
            absmax=torch.empty(blocks, dtype=torch.uint8),
            shape=torch.Size((linear.out_features, linear.in_features)),
            code=torch.empty(16),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=dtype,
            offset=torch.empty(()),
            state2=QuantState(
                absmax=torch.empty(-(-blocks // NESTED_BLOCK)),
                code=torch.empty(256),
                blocksize=NESTED_BLOCK,
                dtype=torch.float32,
            ),
        )
        weight.compress_statistics, weight.quant_type = True, "nf4"  # type: ignore[attr-defined]
        self.weight, self.bias, self.quant_state = weight, linear.bias, weight.quant_state  # type: ignore[attr-defined]
        self.compute_dtype, self.compute_type_is_set, self.support_avx512bf16_for_cpu = dtype, True, False


class _RealBookkeeping(TorchDispatchMode):
    """Above a FakeTensorMode: operations on indices and masks run for real, numbers read from fake tensors are 0."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps every call of `__torch_dispatch__` in two more

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], FakeTensor):  # what FakeTensorMode takes ten times as long for
            if func is _DEVICE:
                return args[0].fake_device
            if _changes_in_place(func):
                return args[0]
            if func.is_view:
                return _view_of(args[0], func, args, kwargs)
        tensors = tensors_in((args, kwargs))
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._without_fakes(func, args, kwargs, tensors)
        if func is aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        if func is aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            args = (args[0], self._numbers(args[1]), *args[2:])
        return func(*args, **kwargs)

    def _without_fakes(self, func: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Real where all that goes in and comes out is bookkeeping; `tensors` are what goes in."""
        if not _are_bookkeeping(tensors):
            return func(*args, **kwargs)
        if not tensors:  # a new tensor, of a size that need not fit here before its dtype is known
            made = func(*args, **kwargs)
            if not _are_bookkeeping(tensors_in(made)):
                return made
        with unset_fake_temporarily():
            made = func(*args, **kwargs)
            if func in _UNINITIALISED:
                made.zero_()  # what belongs there comes from fake tensors, so it stays 0, which is a valid index
        return made if _are_bookkeeping(tensors_in(made)) else func(*args, **kwargs)

    def _numbers(self, indices: Any) -> list[Tensor | None]:
        """Masks among the indices as the numbers of their set places: how many there are has to be known."""
        numbers: list[Tensor | None] = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
                with unset_fake_temporarily():
                    numbers += index.nonzero(as_tuple=True)
            else:
                numbers.append(index)
        return numbers


def _view_of(base: FakeTensor, func: Any, args: Any, kwargs: Any) -> Any:
    with in_kernel_invocation_manager(base.fake_mode):  # inside, a fake tensor is the meta tensor that it is made of
        made = func(*args, **kwargs)
    if isinstance(made, Tensor):
        return FakeTensor(base.fake_mode, made, base.fake_device)
    return [FakeTensor(base.fake_mode, part, base.fake_device) for part in made]


@functools.cache
def _changes_in_place(func: Any) -> bool:
    """Whether an operation of torch writes values into its first argument, returns it, and does nothing else."""
    name = func.name() if func.namespace == "aten" else ""
    return name.split(".")[0].endswith("_") and torch.Tag.inplace_view not in func.tags


def _are_bookkeeping(tensors: list[Tensor]) -> bool:
    """Indices, masks and single numbers, such as the step counter of an optimizer."""
    return all(tensor.dtype in (torch.bool, torch.int32, torch.int64) or tensor.dim() == 0 for tensor in tensors)


class _CardAttention:
    """`scaled_dot_product_attention` as torch runs it on a GPU: the flash kernel in 16 bits without a mask from
    capability 8 on, else the other fused kernel, which takes a mask of floats and as many key heads as query heads."""

    def __init__(self, card: Card) -> None:
        self._has_flash = card.capability >= (8, 0)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """See `torch.nn.functional.scaled_dot_product_attention`."""
        plain = attn_mask is None or isinstance(attn_mask, CausalBias)
        causal = is_causal or isinstance(attn_mask, CausalBias)
        if plain and self._has_flash and query.dtype in (torch.float16, torch.bfloat16):
            return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)[0]
        assert query.shape[1] == key.shape[1], "this kernel does not share key heads: torch would hold all scores"
        bias = None if plain else self._bias(attn_mask, query)
        needs_grad = torch.is_grad_enabled() and query.requires_grad
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_grad, 0.0, causal, scale=scale
        )[0]

    def _bias(self, mask: Any, query: Tensor) -> Tensor:
        """The mask as torch makes it for the kernel: of the dtype of the query, rows padded to 16 values."""
        rows, keys = mask.shape[-2:]
        padded = query.new_empty((rows, -(-keys // 16) * 16))
        return padded[:, :keys].expand(*query.shape[:2], rows, keys)


def workspace_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that an operation uses inside on a GPU: read from the sources of bitsandbytes, flash-attention 2 and torch.

    Decoded weights of a 4-bit product of more than FUSED_ROWS rows (which cards decode depends on tables; here all do),
    the scales decoded beside them, the fp32 sums of the backward of attention, and the copy of what is summed in
    another dtype (16 bits are summed in fp32 without one).
    """
    if func is torch.ops.bitsandbytes.gemm_4bit.default:
        rows, values = args[0].numel() // args[0].shape[-1], args[2][0] * args[2][1]
        return 0 if rows <= FUSED_ROWS else values * args[0].element_size() + 8 * values // BLOCK
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        query, key = args[1], args[2]
        batch, heads, tokens, width = query.shape
        shared = 2 * batch * heads * key.shape[2] * width * query.element_size() if key.shape[1] != heads else 0
        return 4 * batch * heads * (tokens + 128) * width + shared
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        return 4 * args[1].numel()
    if func is aten.sum.dim_IntList and (dtype := kwargs.get("dtype")) not in (None, args[0].dtype):
        return 0 if args[0].element_size() == 2 and dtype == torch.float32 else args[0].numel() * dtype.itemsize
    return 0
