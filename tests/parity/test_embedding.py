"""The embedding on the host against the one on the card: same hidden states, same gradients, fewer bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from lowmem_grpo.errors import ModelError
from lowmem_grpo.memory.embedding import offload_embedding
from lowmem_grpo.memory.host import in_host_memory
from lowmem_grpo.model import LoraSpec, Policy, attach_adapter
from tests.helpers import CPU, gradients_of, pack, random_groups, shake_adapter, tiny_policy, updater_of
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer

DEVICES = [torch.device(name) for name in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))]
HERE = torch.device("cpu")
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3_text", "phi3"]
WORDS, WIDTH = 264, 32
IDS_BT = torch.tensor([[5, 200, 5, 263, 0, 2], [9, 9, 1, 30, 31, 32]])


def hidden_states(model: Any, ids_BT: Tensor) -> Tensor:
    with torch.no_grad():
        return model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_hidden_states_are_the_same_bit_for_bit(family: str, dtype: torch.dtype, device: torch.device) -> None:
    plain = tiny_model(family, dtype=dtype, tied=False).to(device).requires_grad_(False)
    moved = copy.deepcopy(plain)
    freed = offload_embedding(moved, device)
    assert freed == WORDS * WIDTH * dtype.itemsize
    ids_BT = IDS_BT.to(device)
    rows, expected = (model.get_input_embeddings()(ids_BT) for model in (moved, plain))
    assert rows.device == ids_BT.device
    assert rows.dtype == dtype
    assert torch.equal(rows, expected)
    assert torch.equal(hidden_states(moved, ids_BT), hidden_states(plain, ids_BT))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("first", ["offload", "adapter"])
def test_gradients_of_the_adapter_are_the_same_bit_for_bit(family: str, first: str) -> None:
    groups = random_groups()
    expected = gradients_of(updater_of(tiny_policy(family, tied=False)), pack(groups))
    base = tiny_model(family, tied=False).requires_grad_(False)
    if first == "offload":
        offload_embedding(base, HERE)
    model = attach_adapter(base, LoraSpec(rank=4, alpha=8))
    if first == "adapter":
        offload_embedding(model, HERE)
    policy = Policy(model, tiny_tokenizer(), CPU, base_name="tiny")
    shake_adapter(policy)
    gradients = gradients_of(updater_of(policy), pack(groups))
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], value) and value.norm() > 0 for name, value in expected.items())


def test_the_module_and_its_state_stay_what_they_were() -> None:
    model = tiny_model(tied=False).requires_grad_(False)
    embedding, before = model.get_input_embeddings(), copy.deepcopy(model.state_dict())
    offload_embedding(model, HERE)
    assert model.get_input_embeddings() is embedding
    assert isinstance(embedding, nn.Embedding)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    # What is loaded afterwards is what is looked up.
    other = tiny_model(tied=False, seed=1)
    model.load_state_dict(other.state_dict())
    assert torch.equal(hidden_states(model, IDS_BT), hidden_states(other, IDS_BT))


def test_a_copy_looks_up_its_own_rows() -> None:
    model = tiny_model(tied=False).requires_grad_(False)
    offload_embedding(model, HERE)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_input_embeddings().weight.zero_()
    assert model.get_input_embeddings()(IDS_BT).abs().sum() > 0
    assert twin.get_input_embeddings()(IDS_BT).abs().sum() == 0


def test_the_second_call_does_nothing() -> None:
    model = tiny_model("gemma3_text", tied=False).requires_grad_(False)
    assert offload_embedding(model, HERE) == WORDS * WIDTH * 4
    rows, weight = model.get_input_embeddings()(IDS_BT), model.get_input_embeddings().weight
    assert offload_embedding(model, HERE) == 0
    assert model.get_input_embeddings().weight is weight
    assert torch.equal(model.get_input_embeddings()(IDS_BT), rows)


def test_what_lies_on_the_host_is_made_there_and_what_is_returned_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tied=False).requires_grad_(False)
    made: list[tuple[tuple[int, ...], bool]] = []
    empty = torch.empty

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        made.append((tuple(tensor.shape), in_host_memory()))
        return tensor

    monkeypatch.setattr(torch, "empty", noting)
    offload_embedding(model, HERE)
    rows = model.get_input_embeddings()(IDS_BT)
    assert made == [((WORDS, WIDTH), True), ((12, WIDTH), True), ((2, 6, WIDTH), False)]
    assert rows.untyped_storage().data_ptr() != model.get_input_embeddings().weight.untyped_storage().data_ptr()


def test_it_traces_with_fake_weights_and_real_ids() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(tiny_config("gemma2", tied=False)).requires_grad_(False)
        assert offload_embedding(model, HERE) == WORDS * WIDTH * 4
        rows = model.get_input_embeddings()(IDS_BT)
    assert rows.shape == (2, 6, WIDTH)


# Refusals.


def refusal(model: Any) -> str:
    embedding = model.get_input_embeddings()
    weight, forward = getattr(embedding, "weight", None), embedding.forward
    with pytest.raises(ModelError) as caught:
        offload_embedding(model, HERE)
    assert getattr(embedding, "weight", None) is weight
    assert embedding.forward == forward
    return str(caught.value)


def test_a_tied_embedding_is_refused() -> None:
    assert "same tensor" in refusal(tiny_model(tied=True).requires_grad_(False))


def test_a_trained_embedding_is_refused() -> None:
    assert "trained" in refusal(tiny_model(tied=False))


def test_an_embedding_that_computes_more_is_refused() -> None:
    class Normed(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.normalize(super().forward(input), dim=-1)

    model = tiny_model(tied=False)
    model.set_input_embeddings(Normed(WORDS, WIDTH))
    assert "Normed, which computes more" in refusal(model.requires_grad_(False))


def test_an_adapter_on_the_embedding_is_refused() -> None:
    model = tiny_model(tied=False)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["embed_tokens"], task_type="CAUSAL_LM"))
    assert "more than a look-up" in refusal(wrapped)
