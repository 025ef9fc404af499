"""Layer inputs on the host against plain checkpointing: bit-equal values, fewer bytes on the card, blocks reused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from lowmem_grpo.errors import ModelError
from lowmem_grpo.memory import offload as offload_module
from lowmem_grpo.memory.live import LiveBytes
from lowmem_grpo.memory.offload import ActivationOffload
from lowmem_grpo.model import LoraSpec, Policy, attach_adapter
from lowmem_grpo.types import PackedMicroBatch
from tests.helpers import CPU, group_of, pack, random_groups, shake_adapter, tiny_policy
from tests.tiny import tiny_config, tiny_tokenizer

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LAYERS, WIDTH = 8, 32
Saving = Callable[[], AbstractContextManager[None]]


def decoder_of(policy: Policy) -> nn.Module:
    return policy.model.get_base_model().get_decoder()


def deep_policy(layers: int = LAYERS) -> Policy:
    """A tiny llama of many layers; its width is 32, its values have 4 bytes."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(tiny_config(layers=layers)).eval()
    policy = Policy(attach_adapter(base, LoraSpec(rank=4, alpha=8)), tiny_tokenizer(), CPU, base_name="tiny")
    shake_adapter(policy)
    policy.update_mode()
    return policy


def loss_of(policy: Policy, micro: PackedMicroBatch, saving: AbstractContextManager[None]) -> Tensor:
    with saving:
        logprobs_BT, _ = policy.logprobs(micro, temperature=0.7, head_chunk_tokens=5)
    return (logprobs_BT * micro.weights_BT).sum()


def taken_gradients(policy: Policy) -> dict[str, Tensor]:
    """The gradients, moved out of the masters."""
    gradients = {}
    for name, parameter in policy.trainable_parameters().items():
        assert parameter.grad is not None, name
        gradients[name], parameter.grad = parameter.grad, None
    return gradients


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []
    assert all(value.abs().sum() > 0 for value in expected.values())


# Values.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_loss_and_gradients_are_the_same_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(family, dtype)
    # Without it the first layer's input is a leaf that stays, and the two layers of a tiny model leave nothing to move.
    policy.model.get_base_model().disable_input_require_grads()
    policy.update_mode()
    offload = ActivationOffload(decoder_of(policy), block_bytes=512)
    for micro in pack(random_groups(), micro_batch_tokens=24):
        plain = loss_of(policy, micro, nullcontext())
        plain.backward()
        expected = taken_gradients(policy)
        moved = loss_of(policy, micro, offload.saving())
        assert offload.host_bytes_in_use > 0
        moved.backward()
        assert torch.equal(moved, plain)
        assert_same_bits(taken_gradients(policy), expected)
        assert offload.host_bytes_in_use == 0


# Bytes.


def long_micro_batch() -> PackedMicroBatch:
    """So many tokens that an input is larger than the gradients of a layer's adapters."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 260, (4, 90), generator=generator).tolist()
    groups = [group_of(prompt, [[7, 8, 9], [10, 11], [12]], [1.0, 0.0, 0.5]) for prompt in prompts]
    (micro,) = pack(groups, micro_batch_tokens=1000)
    return micro


def card_bytes(policy: Policy, micro: PackedMicroBatch, saving: Saving) -> tuple[int, int]:
    """Bytes alive after the forward, and the most during the backward; `LiveBytes` leaves out what is on the host."""
    # A second micro-batch, so that the gradients it is added to are there.
    loss_of(policy, micro, saving()).backward()
    with LiveBytes() as live:
        loss = loss_of(policy, micro, saving())
        after_forward = live.peak_bytes = live.live_bytes
        loss.backward()
    taken_gradients(policy)
    return after_forward, live.peak_bytes


@pytest.mark.parametrize("first_is_leaf", [True, False])
def test_all_inputs_but_the_last_and_a_leaf_leave_the_card(first_is_leaf: bool) -> None:
    policy = deep_policy()
    if first_is_leaf:
        policy.model.get_base_model().enable_input_require_grads()
    micro = long_micro_batch()
    input_bytes = micro.input_ids_N.shape[0] * WIDTH * 4
    moved = LAYERS - 1 - int(first_is_leaf)
    plain_after, plain_peak = card_bytes(policy, micro, nullcontext)
    offload = ActivationOffload(decoder_of(policy), block_bytes=1024)
    after, peak = card_bytes(policy, micro, offload.saving)
    assert plain_after - after == moved * input_bytes
    # Plain, the peak is where all inputs still wait; here the one in use and the next are on the card.
    assert plain_peak - peak == (moved - 1) * input_bytes
    assert offload.host_bytes == moved * -(-input_bytes // 1024) * 1024


def test_micro_batches_in_a_row_use_the_same_blocks() -> None:
    policy = deep_policy()
    large, small = (pack(random_groups(), micro_batch_tokens=n)[0] for n in (1000, 15))
    assert large.input_ids_N.shape[0] > small.input_ids_N.shape[0]
    offload = ActivationOffload(decoder_of(policy), block_bytes=256)
    loss_of(policy, large, offload.saving()).backward()
    made = offload.host_bytes
    for micro in (small, large, large):
        loss_of(policy, micro, offload.saving()).backward()
        assert offload.host_bytes_in_use == 0
    assert offload.host_bytes == made


def test_position_angles_are_not_moved() -> None:
    # A head of the tiny model is 8 wide: with 2 layers and nothing else moved, the host holds one input.
    policy = deep_policy(layers=2)
    policy.model.get_base_model().disable_input_require_grads()
    micro = pack(random_groups())[0]
    offload = ActivationOffload(decoder_of(policy), block_bytes=4)
    loss = loss_of(policy, micro, offload.saving())
    assert offload.host_bytes_in_use == micro.input_ids_N.shape[0] * WIDTH * 4
    loss.backward()


def test_it_traces_on_fake_tensors() -> None:
    with FakeTensorMode():
        stack = Stack(torch.device("cpu"))
        offload = ActivationOffload(stack, block_bytes=256)
        with LiveBytes() as live:
            for _ in range(2):
                with offload.saving():
                    loss = stack(torch.randn(1, 9, WIDTH)).sum()
                assert offload.host_bytes_in_use == offload.host_bytes == (LAYERS - 1) * 1280  # 1152 in blocks of 256
                loss.backward()
            del loss
        assert live.live_bytes == sum(p.numel() * 4 for p in stack.parameters())


# Lifetimes.


class Layer(GradientCheckpointingLayer):
    """A residual layer that may be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, hidden: Tensor, scale: float) -> Tensor:
        if self.fails:
            raise RuntimeError("told to fail")
        return hidden + scale * torch.tanh(self.linear(hidden))


class Stack(nn.Module):
    """A decoder of eight such layers and a first matrix, in train mode with checkpointing."""

    def __init__(self, device: torch.device, *, checkpointing: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        with device:
            self.first = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        for layer in self.layers:
            layer.gradient_checkpointing = checkpointing
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = layer(hidden, scale=0.5)
        return hidden


def stack_gradients(stack: Stack) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}
    stack.zero_grad()
    return gradients


def gradients_by(stack: Stack, x: Tensor, saving: Saving) -> dict[str, Tensor]:
    with saving():
        loss = stack(x).square().sum()
    loss.backward()
    return stack_gradients(stack)


def a_batch(device: str, seed: int = 0, tokens: int = 9) -> Tensor:
    return torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_two_forwards_may_wait_for_their_backwards_in_any_order(device: str) -> None:
    stack = Stack(torch.device(device))
    offload = ActivationOffload(stack, block_bytes=256)
    batches = [a_batch(device, seed, tokens) for seed, tokens in ((0, 9), (1, 5))]
    expected = [gradients_by(stack, x, nullcontext) for x in batches]
    for order in ((0, 1), (1, 0)):
        losses = []
        for x in batches:
            with offload.saving():
                losses.append(stack(x).square().sum())
        for index in order:
            losses[index].backward()
            assert_same_bits(stack_gradients(stack), expected[index])
    assert offload.host_bytes_in_use == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_that_is_kept_can_go_backward_twice(device: str) -> None:
    stack, x = Stack(torch.device(device)), a_batch(device)
    expected = gradients_by(stack, x, nullcontext)
    offload = ActivationOffload(stack, block_bytes=256)
    with offload.saving():
        loss = stack(x).square().sum()
    in_use = offload.host_bytes_in_use
    loss.backward(retain_graph=True)
    assert_same_bits(stack_gradients(stack), expected)
    assert offload.host_bytes_in_use == in_use
    # Another forward in between must not write where the kept graph has its inputs.
    gradients_by(stack, a_batch(device, seed=1), offload.saving)
    loss.backward()
    assert_same_bits(stack_gradients(stack), expected)
    assert offload.host_bytes_in_use == 0
    with pytest.raises(RuntimeError, match=r"second time|already"):
        loss.backward()


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_that_is_dropped_gives_its_blocks_back(device: str) -> None:
    stack, x = Stack(torch.device(device)), a_batch(device)
    offload = ActivationOffload(stack, block_bytes=256)
    with offload.saving():
        loss = stack(x).square().sum()
    assert offload.host_bytes_in_use == offload.host_bytes > 0
    del loss
    assert offload.host_bytes_in_use == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_failure_leaves_nothing_behind(when: str, device: str) -> None:
    stack, x = Stack(torch.device(device)), a_batch(device)
    expected = gradients_by(stack, x, nullcontext)
    offload = ActivationOffload(stack, block_bytes=256)
    plain = [layer._gradient_checkpointing_func for layer in stack.layers]

    def fail() -> None:
        stack.layers[4].fails = when == "forward"
        with offload.saving():
            loss = stack(x).square().sum()
        stack.layers[4].fails = True
        loss.backward()

    with pytest.raises(RuntimeError, match="told to fail"):
        fail()
    stack.layers[4].fails = False
    stack.zero_grad()
    assert [layer._gradient_checkpointing_func for layer in stack.layers] == plain
    assert offload.host_bytes_in_use == 0
    made = offload.host_bytes
    assert_same_bits(gradients_by(stack, x, offload.saving), expected)
    assert offload.host_bytes == max(made, (LAYERS - 1) * 1280)


def test_forwards_without_gradients_or_in_eval_mode_move_nothing() -> None:
    stack = Stack(torch.device("cpu"))
    offload = ActivationOffload(stack)
    with offload.saving(), torch.no_grad():
        stack(a_batch("cpu"))
    stack.eval()
    with offload.saving():
        stack(a_batch("cpu")).sum().backward()
    assert offload.host_bytes == 0


def test_a_decoder_without_checkpointing_is_refused() -> None:
    with pytest.raises(ModelError, match=r"memory\.activation_checkpointing=true"):
        ActivationOffload(Stack(torch.device("cpu"), checkpointing=False))


# Order of the copies, without a GPU to run them on.


class LateLane:
    """The laziest stream there could be: a copy runs when it is waited for, after all that were started before it.

    Who reads before waiting reads NaN; a tensor of the card that died before its copy was waited for is noticed.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[int, list[tuple[Any, Any]]]] = []
        self.started = 0

    def start(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> int:
        for target in targets:
            target.fill_(torch.nan)
        self.started += 1
        # Weakly, as a stream does; views die at once, so what is watched is their storage.
        pairs = [(self.watched(target), self.watched(source)) for target, source in zip(targets, sources, strict=True)]
        self.waiting.append((self.started, pairs))
        return self.started

    @staticmethod
    def watched(tensor: Tensor) -> Callable[[], Tensor]:
        storage, layout = (
            weakref.ref(tensor.untyped_storage()),
            (tensor.storage_offset(), tensor.shape, tensor.stride()),
        )
        dtype = tensor.dtype

        def alive() -> Tensor:
            found = storage()
            assert found is not None, "memory was given up before the copy was waited for"
            return torch.empty(0, dtype=dtype).set_(found, *layout)

        return alive

    def wait(self, mark: int) -> None:
        while self.waiting and self.waiting[0][0] <= mark:
            for target, source in self.waiting.pop(0)[1]:
                target().copy_(source())


@pytest.fixture
def late_lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateLane]:
    lane = LateLane()
    monkeypatch.setattr(offload_module, "_lane_beside", lambda device: lane)
    yield lane


def test_nothing_is_read_or_given_up_before_its_copy_is_waited_for(late_lane: LateLane) -> None:
    stack, batches = Stack(torch.device("cpu")), [a_batch("cpu", seed) for seed in range(3)]
    expected = [gradients_by(stack, x, nullcontext) for x in batches]
    offload = ActivationOffload(stack, block_bytes=256)
    for x, gradients in zip(batches, expected, strict=True):
        assert_same_bits(gradients_by(stack, x, offload.saving), gradients)
    assert late_lane.started == 3 * 2 * (LAYERS - 1)
    assert late_lane.waiting == []


def test_a_copy_under_way_is_waited_for_when_its_graph_dies(late_lane: LateLane) -> None:
    stack, x = Stack(torch.device("cpu")), a_batch("cpu")
    offload = ActivationOffload(stack, block_bytes=256)

    def fail() -> None:
        with offload.saving():
            loss = stack(x).square().sum()
        stack.layers[5].fails = True
        loss.backward()

    with pytest.raises(RuntimeError, match="told to fail"):
        fail()
    # The inputs of layers 6, 5 and 4 were asked for, the last of them ahead of need.
    assert late_lane.started == LAYERS - 1 + 3
    assert late_lane.waiting == []
    assert offload.host_bytes_in_use == 0


def test_an_input_is_asked_for_one_layer_ahead(late_lane: LateLane) -> None:
    stack, x = Stack(torch.device("cpu")), a_batch("cpu")
    offload = ActivationOffload(stack, block_bytes=256)
    with offload.saving():
        loss = stack(x).square().sum()
    under_way: list[int] = []
    for layer in stack.layers:
        layer.linear.register_forward_pre_hook(lambda *_: under_way.append(len(late_lane.waiting)))
    loss.backward()
    # While layer l is computed again, one copy is under way, that of layer l - 1; behind layer 0 none is left.
    assert under_way == [1] * (LAYERS - 1) + [0]
