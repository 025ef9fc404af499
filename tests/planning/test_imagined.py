"""The card that is not there: what is real on it, what fake, which kernel attends, and what kernels use inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_grpo import attention
from lowmem_grpo.catalog.shapes import model_shape
from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.memory.trace import AllocationTrace
from lowmem_grpo.model import DTYPES, ModelSpec, load_base
from lowmem_grpo.planning.imagined import StandIn4bit, imagined_base, imagined_card, workspace_of
from lowmem_grpo.quiet import quiet_loading
from lowmem_grpo.types import Card
from tests.helpers import CPU
from tests.tiny import FAMILIES, save_tiny, tiny_config

AMPERE, TURING = Card("RTX 3060", "cuda", (8, 6), 12 << 30), Card("T4", "cuda", (7, 5), 16 << 30)
aten = torch.ops.aten


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


class Calls(TorchDispatchMode):
    """The operations inside the block, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[Any, ...]]] = []
        self.workspaces: list[int] = []
        """What `workspace_of` says of each, the zeros left out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append((func, args))
        if inside := workspace_of(func, args, kwargs or {}):
            self.workspaces.append(inside)
        return func(*args, **(kwargs or {}))

    def arguments_of(self, func: Any) -> list[tuple[Any, ...]]:
        return [args for made, args in self.made if made is func]


# ---- what is real


def test_indices_and_masks_are_real_floats_and_bytes_are_fake() -> None:
    with imagined_card(AMPERE):
        real = [
            torch.arange(5),
            torch.zeros(2, 3, dtype=torch.long),
            torch.ones(4, dtype=torch.bool),
            torch.tensor([3, 1, 2], dtype=torch.int32),
            torch.tensor(2.5),  # the step of an optimizer
            torch.arange(6).view(2, 3)[1] + 1,
            torch.tensor([True, False]).nonzero(),
        ]
        fake = [
            torch.zeros(3),
            torch.empty(2, 2, dtype=torch.bfloat16),
            torch.zeros(2, dtype=torch.uint8),
            torch.zeros(2, dtype=torch.int8),
            torch.tensor([0.5, 1.0]),
            torch.arange(3).float(),
            torch.zeros(3) + torch.arange(3),
            torch.randn(4),
        ]
    assert [is_fake(tensor) for tensor in real] == [False] * 7
    assert [is_fake(tensor) for tensor in fake] == [True] * 8
    assert [real[i].tolist() for i in (0, 3, 5, 6)] == [[0, 1, 2, 3, 4], [3, 1, 2], [4, 5, 6], [[0]]]


def test_a_fake_tensor_of_a_size_that_no_machine_has() -> None:
    with imagined_card(AMPERE):
        huge = torch.zeros(1 << 20, 1 << 22, dtype=torch.bfloat16)
        assert is_fake(huge)
        assert huge.untyped_storage().nbytes() == 1 << 43
        assert (huge @ huge.T).shape == (1 << 20, 1 << 20)


def test_indices_that_would_come_from_fake_tensors_are_zero() -> None:
    with imagined_card(AMPERE):
        made = [
            torch.empty(3, dtype=torch.long),
            torch.arange(3).new_empty(2, 2),
            torch.empty_like(torch.arange(4)),
        ]
        rows = torch.zeros(5, 7)[made[0]]
    assert [tensor.abs().sum().item() for tensor in made] == [0, 0, 0]
    assert rows.shape == (3, 7)


def test_numbers_read_from_fake_tensors_are_zero() -> None:
    with imagined_card(AMPERE):
        x = torch.ones(2, 3)
        assert [x.sum().item(), float(x[0, 0]), x.argmax().item()] == [0.0, 0.0, 0]
        assert bool(x.isfinite().all()) is False
        assert type(x.sum().item()) is float
        assert type(x.argmax().item()) is int
        assert x.tolist() == [[0.0] * 3] * 2
        assert x.argmax(1).tolist() == [0, 0]
        assert torch.arange(3)[2].item() == 2  # real ones are what they are


def test_a_mask_as_index_takes_as_many_rows_as_it_has_places() -> None:
    with imagined_card(AMPERE):
        x, mask = torch.zeros(4, 6), torch.tensor([True, False, True, True])
        taken = x[mask]
        x[mask] = torch.ones(3, 6)
        x[0, torch.tensor([1, 2])] = 5.0
        spread = torch.zeros(2, 2).masked_scatter(torch.tensor([[True, False], [True, True]]), torch.ones(3))
    assert is_fake(taken)
    assert (taken.shape, spread.shape) == ((3, 6), (2, 2))


def test_places_of_a_fake_mask_are_none() -> None:
    with imagined_card(AMPERE):
        broken = (torch.zeros(3, 2) > 0).nonzero()
    assert broken.shape == (0, 2)
    assert broken.dtype == torch.long


@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)
def test_views_and_changes_in_place_are_those_of_real_tensors(shape: list[int], dtype: torch.dtype) -> None:
    """These do not go through FakeTensorMode; sizes, strides, offsets and shared storages must not suffer."""
    steps: list[Callable[[Tensor], Any]] = [
        lambda x: x.t() if x.dim() == 2 else x.transpose(0, 2),
        lambda x: x[:, -1:],
        lambda x: x.select(0, -1),
        lambda x: x.view(-1),
        lambda x: x.unsqueeze(1).expand(-1, 3, *x.shape[1:]),
        lambda x: x.split(1, dim=1),
        lambda x: x.unbind(0),
        lambda x: x.permute(*reversed(range(x.dim()))),
        lambda x: x.detach(),
        lambda x: x.unsqueeze_(1),
        lambda x: x.transpose_(0, 1),
        lambda x: x.add_(1),
        lambda x: x.copy_(x.clone()),
        lambda x: x.zero_(),
        lambda x: x[0].fill_(1),
        lambda x: x.mul_(x.clone()).sub_(x.clone()[:1]),
    ]
    for step in steps:
        real = torch.zeros(shape, dtype=dtype)
        expected = step(real)
        with imagined_card(AMPERE):
            fake = torch.zeros(shape, dtype=dtype)
            found = step(fake)
        pairs = [(found, expected)] if isinstance(expected, Tensor) else list(zip(found, expected, strict=True))
        for own, other in pairs:
            assert is_fake(own)
            assert (own.shape, own.stride(), own.storage_offset(), own.dtype, own.device) == (
                other.shape,
                other.stride(),
                other.storage_offset(),
                other.dtype,
                other.device,
            )
            assert own.untyped_storage()._cdata == fake.untyped_storage()._cdata


def test_a_change_in_place_still_counts_as_one() -> None:
    """Autograd's check of saved tensors and the updater's check of half-taken steps both ask for the version."""
    with imagined_card(AMPERE):
        x = torch.zeros(3)
        x.add_(1).mul_(2)
        assert x._version == 2
        leaf = torch.ones(3, requires_grad=True)
        kept = leaf * 2
        y = kept.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_gradients_have_the_sizes_of_real_ones() -> None:
    with imagined_card(AMPERE):
        weight = torch.zeros(4, 3, requires_grad=True)
        rows = F.embedding(torch.tensor([0, 3, 3]), weight)
        (rows.t()[1:].split(1, dim=0)[0] * 2).sum().backward()
        assert weight.grad is not None
    assert is_fake(weight.grad)
    assert weight.grad.shape == (4, 3)


def test_everything_is_as_before_outside() -> None:
    attend, swap, lower_right = F.scaled_dot_product_attention, torch.utils.swap_tensors, attention.causal_lower_right
    with pytest.raises(ZeroDivisionError), imagined_card(AMPERE):
        assert F.scaled_dot_product_attention is not attend
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is attend
    assert torch.utils.swap_tensors is swap
    assert attention.causal_lower_right is lower_right
    assert not is_fake(torch.zeros(2))


# ---- models


def held_bytes(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size, int]]:
    """What a model holds, by name: type, sizes and bytes of parameters, buffers and of what unpacks 4-bit weights."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            name += "+"
            tensors |= {f"{name}.{key}": value for key, value in vars(state).items() if isinstance(value, Tensor)}
            state = state.state2
    return {name: (t.dtype, t.shape, t.untyped_storage().nbytes()) for name, t in tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("tied", "quantization", "dtype"), [(True, "none", "float32"), (False, "nf4", "bfloat16"), (True, "nf4", "float16")]
)
def test_a_base_holds_what_a_loaded_one_holds(
    family: str, tied: bool, quantization: str, dtype: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, family, tied=tied)
    spec = ModelSpec(folder, base_name=family, quantization=quantization, weights="4bit", compute_dtype=dtype)
    with quiet_loading():
        loaded = load_base(spec, CPU)
    shape = model_shape(tiny_config(family, tied=tied).to_dict(), family)
    with imagined_card(CPU):
        base = imagined_base(shape, DTYPES[dtype], quantized=quantization == "nf4")
    assert held_bytes(base) == held_bytes(loaded)
    assert all(is_fake(parameter) and not parameter.requires_grad for parameter in base.parameters())
    assert (base.get_input_embeddings().weight is base.get_output_embeddings().weight) == tied
    packed = [layer for layer in base.modules() if isinstance(layer, StandIn4bit)]
    assert len(packed) == (0 if quantization == "none" else 2 * len(shape.linears))


# ---- the attention of a card


def heads(count: int, tokens: int, dtype: torch.dtype = torch.bfloat16, width: int = 8) -> Tensor:
    return torch.zeros(1, count, tokens, width, dtype=dtype, requires_grad=True)


def attend(card: Card, mask: Callable[[], Any], *, heads_kv: int = 4, dtype: torch.dtype = torch.bfloat16) -> Calls:
    """The operations of an attention of 4 heads, 5 queries and 9 keys on a card."""
    with imagined_card(card):
        query, key, value = heads(4, 5, dtype), heads(heads_kv, 9, dtype), heads(heads_kv, 9, dtype)
        given_mask = mask()
        with Calls() as calls:
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=given_mask, scale=0.5, enable_gqa=heads_kv != 4
            )
            assert is_fake(output)
            assert output.shape == (1, 4, 5, 8)
            output.sum().backward()
        assert key.grad is not None
        assert key.grad.shape == key.shape
    return calls


FLASH, EFFICIENT = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)


def no_mask() -> None:
    return None


def bool_mask() -> Tensor:
    return torch.ones(5, 9, dtype=torch.bool)


def lower_right() -> Any:
    return attention.causal_lower_right(5, 9)


@pytest.mark.parametrize("mask", [no_mask, lower_right])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_without_a_mask_run_the_flash_kernel_from_ampere_on(
    mask: Callable[[], Any], heads_kv: int, dtype: torch.dtype
) -> None:
    calls = attend(AMPERE, mask, heads_kv=heads_kv, dtype=dtype)
    (arguments,) = calls.arguments_of(FLASH)
    # Trailing arguments at their defaults are not passed on.
    assert (arguments[4:5] == (True,)) == (mask is lower_right)  # causal
    assert not calls.arguments_of(EFFICIENT)


@pytest.mark.parametrize(
    ("card", "mask", "dtype"),
    [
        (TURING, no_mask, torch.float16),
        (TURING, lower_right, torch.float16),
        (AMPERE, no_mask, torch.float32),
        (AMPERE, bool_mask, torch.bfloat16),
    ],
)
def test_all_else_runs_the_other_kernel(card: Card, mask: Callable[[], Any], dtype: torch.dtype) -> None:
    calls = attend(card, mask, dtype=dtype)
    (arguments,) = calls.arguments_of(EFFICIENT)
    assert arguments[4] is True  # what the backward needs is kept
    assert (arguments[6:7] == (True,)) == (mask is lower_right)
    assert (arguments[3] is None) == (mask is not bool_mask)
    assert not calls.arguments_of(FLASH)


def test_the_other_kernel_takes_the_mask_as_floats_in_rows_of_sixteen() -> None:
    with imagined_card(AMPERE):
        mask = torch.ones(5, 35, dtype=torch.bool)
        query, key = heads(4, 5), heads(4, 35)
        with LiveBytes() as live, torch.no_grad():
            F.scaled_dot_product_attention(query, key, key, attn_mask=mask)
            # 5 rows of 48 values of two bytes, the output of 4 x 5 x 8, and two numbers of the generator.
            assert live.peak_bytes == 2 * 5 * 48 + 2 * 4 * 5 * 8 + 2 * 8
        (arguments,) = attend(AMPERE, bool_mask).arguments_of(EFFICIENT)
        assert arguments[3].shape == (1, 4, 5, 9)
        assert arguments[3].stride() == (0, 0, 16, 1)


@pytest.mark.parametrize(("card", "mask"), [(TURING, no_mask), (AMPERE, bool_mask)])
def test_the_other_kernel_does_not_share_key_heads(card: Card, mask: Callable[[], Any]) -> None:
    with pytest.raises(AssertionError, match="does not share key heads"):
        attend(card, mask, heads_kv=2)


def test_without_gradients_nothing_is_kept_for_them() -> None:
    with imagined_card(TURING), torch.no_grad(), Calls() as calls:
        F.scaled_dot_product_attention(*(torch.zeros(1, 2, 3, 8) for _ in range(3)))
    (arguments,) = calls.arguments_of(EFFICIENT)
    assert arguments[4] is False


def test_a_cpu_runs_its_own_kernel() -> None:
    with imagined_card(CPU):
        assert type(F.scaled_dot_product_attention).__name__ == "builtin_function_or_method"
    calls = attend(CPU, bool_mask, heads_kv=2, dtype=torch.float32)
    names = {func.name() for func, _ in calls.made}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names


# ---- what kernels use inside


def workspaces(run: Callable[[], Any]) -> list[int]:
    with imagined_card(AMPERE), Calls() as calls:
        run()
    return calls.workspaces


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), (4, torch.float32), (5, torch.bfloat16)])
def test_a_product_of_more_than_four_rows_decodes_its_weight(rows: int, dtype: torch.dtype) -> None:
    def run() -> None:
        layer = StandIn4bit(nn.Linear(128, 96, bias=False, dtype=dtype), dtype)
        with torch.no_grad():
            layer(torch.zeros(rows, 128, dtype=dtype))

    # 96 x 128 = 12288 weights of two bytes, and 192 scales in fp32 twice: decoded, and with the offset added.
    assert workspaces(run) == ([] if rows <= 4 else [2 * 12288 + 2 * 4 * 192])


def test_rows_are_those_of_all_axes_and_decoding_apart_needs_nothing_inside() -> None:
    def run() -> None:
        layer = StandIn4bit(nn.Linear(64, 64, bias=False, dtype=torch.float16), torch.float16)
        with torch.no_grad():
            layer(torch.zeros(2, 2, 64, dtype=torch.float16))
            layer(torch.zeros(2, 3, 64, dtype=torch.float16))
        dequantize_4bit(layer.weight.data, layer.weight.quant_state)

    assert workspaces(run) == [2 * 4096 + 2 * 4 * 64]


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_the_backward_of_flash_adds_up_in_fp32(heads_kv: int) -> None:
    def run() -> None:
        query, key, value = heads(4, 100), heads(heads_kv, 300), heads(heads_kv, 300)
        F.scaled_dot_product_attention(query, key, value, enable_gqa=heads_kv != 4).sum().backward()

    # 4 heads x (100 + 128) tokens x 8 in fp32; with shared key heads the gradients of k and v of all 4 heads in bf16.
    shared = 0 if heads_kv == 4 else 2 * 4 * 300 * 8 * 2
    assert workspaces(run) == [4 * 4 * 228 * 8 + shared]


def test_the_backward_of_the_other_kernel_adds_up_in_fp32() -> None:
    def run() -> None:
        query, key = heads(4, 100, torch.float32), heads(4, 300, torch.float32)
        F.scaled_dot_product_attention(query, key, key).sum().backward()

    assert workspaces(run) == [4 * 4 * 100 * 8]


@pytest.mark.parametrize(
    ("dtype", "sum_dtype", "copied_bytes"),
    [
        (torch.float32, torch.float64, 7 * 10 * 8),
        (torch.float32, torch.float32, 0),
        (torch.float32, None, 0),
        (torch.bfloat16, torch.float32, 0),
        (torch.bfloat16, torch.float64, 7 * 10 * 8),
    ],
)
def test_a_sum_in_another_dtype_copies(dtype: torch.dtype, sum_dtype: torch.dtype | None, copied_bytes: int) -> None:
    def run() -> None:
        torch.zeros(7, 10, dtype=dtype).sum(dim=-1, dtype=sum_dtype)

    assert workspaces(run) == [copied_bytes][: bool(copied_bytes)]


def test_the_copy_of_a_sum_is_what_torch_allocates() -> None:
    """Of real tensors, by torch's own profiler: the copy, and nothing else but the result."""
    x = torch.ones(8, 1000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        x.sum(dim=-1, dtype=torch.float64)
    by_name = {event.key: event.cpu_memory_usage for event in profiled.key_averages()}
    assert (
        by_name["aten::_to_copy"] == 8 * 1000 * 8 == workspace_of(aten.sum.dim_IntList, (x,), {"dtype": torch.float64})
    )


def test_the_trace_counts_what_a_kernel_uses_inside_while_it_runs() -> None:
    with imagined_card(AMPERE):
        layer = StandIn4bit(nn.Linear(128, 96, bias=False, dtype=torch.bfloat16), torch.bfloat16)
        x = torch.zeros(8, 128, dtype=torch.bfloat16)
        with AllocationTrace(workspace_of) as trace, torch.no_grad():
            y = layer(x)
    inside, output = 2 * 12288 + 2 * 4 * 192, y.numel() * 2
    assert trace.events == [(1, inside), (2, output), (1, -1)]
    assert (trace.peak_bytes, trace.live_bytes) == (inside + output, output)
