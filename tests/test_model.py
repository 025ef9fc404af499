"""Loading, 4-bit weights, adapters, the reference, dropout, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from lowmem_grpo.errors import ModelError
from lowmem_grpo.memory.decoded import linear_4bit_layers
from lowmem_grpo.model import (
    LoraSpec,
    ModelSpec,
    Policy,
    attach_adapter,
    check_adapter_folder,
    end_token_ids,
    load_base,
    load_policy,
    load_tokenizer,
)
from lowmem_grpo.rollout import SlotEngine
from lowmem_grpo.types import GroupSpan, SamplingParams, ScoredGroup
from tests.helpers import (
    CPU,
    pack,
    problems_of,
    random_groups,
    shake_adapter,
    tiny_policy,
    updater_of,
)
from tests.tiny import FAMILIES, save_tiny, tiny_config, tiny_model, tiny_tokenizer

LINEARS = 14
"""Seven linear layers in each of the two blocks."""
LINEAR_VALUES = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)
"""Weights of q and o, k and v, and the three of the MLP."""
IDS = torch.arange(5, 17)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a saved tiny model, by family."""
    root = tmp_path_factory.mktemp("models")

    def of(family: str) -> Path:
        return root / family if (root / family).exists() else save_tiny(root / family, family)

    return of


@pytest.fixture(scope="module")
def adapter(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained adapter of the tiny llama in 4 bits, as peft writes it."""
    policy = load(folder("llama"))
    shake_adapter(policy)
    path = tmp_path_factory.mktemp("adapters") / "trained"
    policy.model.save_pretrained(path)
    return path


def load(path: Path, lora: LoraSpec | None = None, **spec: Any) -> Policy:
    tokenizer = load_tokenizer(path)
    return load_policy(ModelSpec(path, "tiny", **spec), lora or LoraSpec(rank=4, alpha=8), CPU, tokenizer)


def base_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


def bytes_by_dtype(policy: Policy, *, adapter: bool) -> dict[torch.dtype, int]:
    """Bytes of the base's or of the adapter's tensors."""
    total: Counter[torch.dtype] = Counter()
    for name, parameter in policy.model.named_parameters():
        if ("lora_" in name) is adapter:
            total[parameter.dtype] += parameter.numel() * parameter.element_size()
    return dict(total)


def one_step(policy: Policy, *, lr: float = 0.0, kl_coef: float = 0.0) -> dict[str, float]:
    """One rollout and one update."""
    sampling = SamplingParams(6, temperature=0.7)
    groups = SlotEngine(policy, seed=3).generate(problems_of((40, 41, 42), (60,)), 3, sampling, step=1)
    rewards = (1.0, 0.0, 0.5)
    scored = [ScoredGroup(group, {"reward": rewards}, rewards, (None,) * 3) for group in groups]
    return updater_of(policy, lr=lr, kl_coef=kl_coef).update(pack(scored), 0)


# 4-bit weights.


@pytest.mark.parametrize("weights", ["4bit", "dequantized", "auto"])
def test_nf4_with_double_quantisation(folder: Callable[[str], Path], weights: str) -> None:
    policy = load(folder("llama"), weights=weights)
    layers = linear_4bit_layers(policy.model)
    assert len(layers) == LINEARS
    for layer in layers:
        state = layer.weight.quant_state
        assert (layer.weight.dtype, state.quant_type, state.nested) == (torch.uint8, "nf4", True)
        assert hasattr(layer, "decoded_weight") is (weights != "4bit")  # auto is dequantized on a CPU
    assert sum(layer.weight.numel() for layer in layers) == LINEAR_VALUES // 2


@pytest.mark.parametrize(("name", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
@pytest.mark.parametrize("weights", ["4bit", "dequantized"])
def test_bytes_by_dtype(folder: Callable[[str], Path], name: str, size: int, weights: str) -> None:
    policy = load(folder("llama"), compute_dtype=name, weights=weights)
    dtype = getattr(torch, name)
    # 264 x 32 embeddings, tied with the head, and five norms of 32.
    assert bytes_by_dtype(policy, adapter=False) == {torch.uint8: LINEAR_VALUES // 2, dtype: size * (264 * 32 + 5 * 32)}
    # Rank 4: q, o: 4 x 64 each; k, v: 4 x 48 each; gate, up, down: 4 x 96 each.
    assert bytes_by_dtype(policy, adapter=True) == {torch.float32: 4 * 2 * 4 * (2 * 64 + 2 * 48 + 3 * 96)}
    assert {parameter.dtype for parameter in policy.trainable_parameters().values()} == {torch.float32}
    base = policy.model.get_base_model()
    assert base.get_input_embeddings().weight.dtype == base.get_output_embeddings().weight.dtype == dtype
    assert base.get_input_embeddings().weight is base.get_output_embeddings().weight


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("weights", ["4bit", "dequantized"])
def test_one_rollout_and_one_update_in_every_compute_dtype(
    folder: Callable[[str], Path], name: str, weights: str
) -> None:
    policy = load(folder("qwen2"), compute_dtype=name, weights=weights)
    shake_adapter(policy)
    before = policy.adapter_state()
    metrics = one_step(policy, lr=1e-2)
    # Logits of these random weights reach 7, where bfloat16 numbers lie 0.03 apart and float16 ones 0.004.
    assert metrics["policy/sampler_gap"] <= {"float32": 1e-4, "bfloat16": 0.04, "float16": 0.005}[name]
    assert metrics["optim/skipped"] == 0.0
    assert metrics["optim/grad_norm"] > 0.1
    after = policy.adapter_state()
    assert all(not torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_weights_and_4bit_weights_are_one_policy(folder: Callable[[str], Path], family: str) -> None:
    packed, decoded = (load(folder(family), weights=weights) for weights in ("4bit", "dequantized"))
    torch.testing.assert_close(base_logits(packed.model), base_logits(decoded.model), rtol=0, atol=1e-5)
    for layer, other in zip(linear_4bit_layers(packed.model), linear_4bit_layers(decoded.model), strict=True):
        expected = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        assert torch.equal(other.decoded_weight, expected)


def test_a_prequantised_folder_gives_the_same_model(folder: Callable[[str], Path], tmp_path: Path) -> None:
    fresh = load_base(ModelSpec(folder("llama"), "tiny"), CPU)
    fresh.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    policy = load(tmp_path, prequantized=True)
    layers = linear_4bit_layers(policy.model)
    assert len(layers) == LINEARS
    assert all(layer.weight.quant_state.nested and layer.weight.dtype == torch.uint8 for layer in layers)
    with policy.reference():
        assert torch.equal(base_logits(policy.model), base_logits(fresh))
    shake_adapter(policy)
    assert one_step(policy)["policy/sampler_gap"] <= 1e-4


def test_without_quantisation_the_base_is_as_saved(folder: Callable[[str], Path]) -> None:
    policy = load(folder("llama"), quantization="none")
    assert linear_4bit_layers(policy.model) == []
    assert bytes_by_dtype(policy, adapter=False) == {torch.float32: 4 * (LINEAR_VALUES + 264 * 32 + 5 * 32)}
    with policy.reference():
        assert torch.equal(base_logits(policy.model), base_logits(tiny_model("llama")))


# The reference.


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_base_bit_for_bit(family: str) -> None:
    policy = tiny_policy(family)
    with policy.reference():
        inside = base_logits(policy.model)
    assert torch.equal(inside, base_logits(tiny_model(family)))
    assert not torch.allclose(base_logits(policy.model), inside, atol=1e-2)


def test_a_fresh_adapter_starts_as_the_base() -> None:
    policy = tiny_policy(live=False)
    assert torch.equal(base_logits(policy.model), base_logits(tiny_model()))
    assert one_step(policy, kl_coef=0.1)["policy/kl"] == 0.0


def test_the_reference_can_be_nested_and_left_by_an_exception() -> None:
    policy = tiny_policy()
    live, base = base_logits(policy.model), base_logits(tiny_model())
    with policy.reference():
        with pytest.raises(KeyError), policy.reference():
            raise KeyError("inside")
        assert torch.equal(base_logits(policy.model), base), "the outer block still holds"
    assert torch.equal(base_logits(policy.model), live)
    with pytest.raises(KeyError), policy.reference():
        raise KeyError("inside")
    assert torch.equal(base_logits(policy.model), live)


def test_the_reference_works_in_both_modes_and_leaves_gradients_alone() -> None:
    policy = tiny_policy()
    policy.update_mode()
    with policy.reference():
        assert torch.equal(base_logits(policy.model), base_logits(tiny_model()))
    assert all(p.requires_grad for name, p in policy.model.named_parameters() if "lora_" in name)


# Going on from an adapter.


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_start_adapter_stays_as_the_frozen_reference(
    folder: Callable[[str], Path], adapter: Path, name: str
) -> None:
    policy = load(folder("llama"), LoraSpec(continue_from=adapter), compute_dtype=name)
    mine = {n: p for n, p in policy.model.named_parameters() if ".default." in n}
    start = {n: p for n, p in policy.model.named_parameters() if ".reference." in n}
    assert len(mine) == len(start) == 2 * LINEARS
    assert {(p.dtype, p.requires_grad) for p in mine.values()} == {(torch.float32, True)}
    assert {(p.dtype, p.requires_grad) for p in start.values()} == {(torch.float32, False)}
    assert policy.trainable_parameters().keys() == mine.keys()
    for n, parameter in mine.items():
        assert torch.equal(parameter, start[n.replace(".default.", ".reference.")])
    before = {n: p.clone() for n, p in start.items()}
    one_step(policy, lr=0.1, kl_coef=0.1)
    assert all(torch.equal(p, before[n]) for n, p in start.items())
    for n, parameter in mine.items():
        assert not torch.equal(parameter, start[n.replace(".default.", ".reference.")])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_kl_to_the_start_adapter_begins_at_exactly_0(
    folder: Callable[[str], Path], adapter: Path, name: str
) -> None:
    # In 16 bits both adapters are multiplied with as 16-bit copies of fp32 masters.
    policy = load(folder("llama"), LoraSpec(continue_from=adapter), compute_dtype=name)
    assert one_step(policy, lr=0.05, kl_coef=0.1)["policy/kl"] == 0.0
    assert one_step(policy, lr=0.05, kl_coef=0.1)["policy/kl"] > 1e-4
    # The start is the adapter as it was saved, not the bare base.
    with policy.reference():
        start = base_logits(policy.model)
    again = load(folder("llama"), LoraSpec(continue_from=adapter), compute_dtype=name)
    assert torch.equal(base_logits(again.model), start)
    assert not torch.allclose(base_logits(load(folder("llama"), compute_dtype=name).model), start, atol=0.1)


def test_only_the_live_adapter_is_saved(folder: Callable[[str], Path], adapter: Path) -> None:
    going_on = load(folder("llama"), LoraSpec(continue_from=adapter)).adapter_state()
    fresh = load(folder("llama")).adapter_state()
    assert going_on.keys() == fresh.keys()
    assert {tensor.dtype for tensor in going_on.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: (path / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda path: (path / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda path: edit(path / "adapter_config.json", peft_type="IA3"), "of kind 'IA3', and only LORA"),
        (shutil.rmtree, "has no adapter_config.json"),
    ],
)
def test_a_wrong_adapter_folder_is_refused(
    adapter: Path, tmp_path: Path, spoil: Callable[[Path], object], sentence: str
) -> None:
    check_adapter_folder(adapter)
    path = tmp_path / "copy"
    shutil.copytree(adapter, path)
    spoil(path)
    with pytest.raises(ModelError, match=f"lora.continue_from: .* {sentence}"):
        check_adapter_folder(path)


def test_an_adapter_of_another_shape_is_refused(adapter: Path) -> None:
    wider = tiny_model("llama")
    wider.model.layers[0].mlp.gate_proj = nn.Linear(32, 65, bias=False)
    with pytest.raises(ModelError, match=r"The adapter in .* does not fit this model"):
        attach_adapter(wider, LoraSpec(continue_from=adapter))


# Dropout.


def edit(path: Path, **changes: object) -> None:
    """Change some keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_dropout_in_the_configs_of_model_and_adapter_has_no_effect(
    folder: Callable[[str], Path], adapter: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder("llama"), tmp_path / "model")
    shutil.copytree(adapter, tmp_path / "adapter")
    edit(tmp_path / "model" / "config.json", attention_dropout=0.3)
    edit(tmp_path / "adapter" / "adapter_config.json", lora_dropout=0.3)
    policy = load(tmp_path / "model", LoraSpec(continue_from=tmp_path / "adapter"))
    plain = load(folder("llama"), LoraSpec(continue_from=adapter))
    for mode in (policy.update_mode, policy.sampling_mode):
        mode()
        assert torch.equal(base_logits(policy.model), base_logits(plain.model))
    metrics = one_step(policy, kl_coef=0.1)
    assert metrics["policy/sampler_gap"] <= 1e-5
    assert metrics["policy/kl"] == 0.0


def test_dropout_of_a_model_in_memory_is_switched_off() -> None:
    base = tiny_model("qwen3")
    for layer in base.model.layers:
        layer.self_attn.attention_dropout = 0.3
        layer.mlp.extra = nn.Dropout(0.3)
    policy = Policy(attach_adapter(base, LoraSpec(rank=4)), tiny_tokenizer(), CPU, base_name="tiny")
    policy.update_mode()
    assert torch.equal(base_logits(policy.model), base_logits(tiny_model("qwen3")))
    assert {module.p for module in policy.model.modules() if isinstance(module, nn.Dropout)} == {0.0}


# The adapter's values.


def test_the_initial_weights_depend_on_the_seed_alone() -> None:
    def initial(seed: int, noise: int) -> dict[str, Tensor]:
        base = tiny_model("llama")
        torch.manual_seed(noise)
        model = attach_adapter(base, LoraSpec(rank=4, seed=seed))
        return {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}

    first, same, other = initial(7, noise=1), initial(7, noise=2), initial(8, noise=1)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if "lora_A" in name)
    assert all((first[name] == 0).all() for name in first if "lora_B" in name)


def test_an_adapter_state_comes_back_as_it_was() -> None:
    policy, other = tiny_policy(), tiny_policy(live=False)
    state = policy.adapter_state()
    assert len(state) == 2 * LINEARS
    expected = base_logits(policy.model)
    addresses = {name: p.data_ptr() for name, p in other.trainable_parameters().items()}
    other.load_adapter_state(state)
    assert torch.equal(base_logits(other.model), expected)
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.adapter_state().items())
    assert {name: p.data_ptr() for name, p in other.trainable_parameters().items()} == addresses, "copied in place"
    # The state is a copy: what happens to the live adapter does not reach it.
    shake_adapter(policy, std=1.0)
    other.load_adapter_state(state)
    assert torch.equal(base_logits(other.model), expected)


def test_the_state_of_another_model_is_refused() -> None:
    policy = tiny_policy()
    state = {name.replace("layers.0", "layers.9"): tensor for name, tensor in policy.adapter_state().items()}
    with pytest.raises(ModelError, match=r"does not belong to this model: it has '.*layers\.9"):
        policy.load_adapter_state(state)


def test_a_written_adapter_loads_with_peft_as_it_is(folder: Callable[[str], Path], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder("llama"))
    policy = load_policy(
        ModelSpec(folder("llama"), "acme/tiny", "abc123", quantization="none"), LoraSpec(rank=4), CPU, tokenizer
    )
    shake_adapter(policy)
    save_file(policy.adapter_state(), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(policy.adapter_config()))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    wanted = {"base_model_name_or_path": "acme/tiny", "revision": "abc123", "r": 4, "peft_type": "LORA"}
    assert wanted.items() <= config.items()
    assert (config["inference_mode"], config["lora_dropout"]) == (True, 0.0)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder("llama")), tmp_path)
    assert torch.equal(base_logits(model.eval()), base_logits(policy.model))


def test_writing_the_config_leaves_the_live_one_alone() -> None:
    policy = tiny_policy()
    policy.adapter_config()
    assert policy.model.peft_config["default"].inference_mode is False


# End tokens and positions.


@pytest.mark.parametrize(("listed", "expected"), [(None, {2}), (7, {2, 7}), ([7, 8], {2, 7, 8}), ([2], {2})])
def test_end_tokens_come_from_model_and_tokenizer(listed: int | list[int] | None, expected: set[int]) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = listed
    assert end_token_ids(model, tiny_tokenizer()) == expected


def test_a_model_without_any_end_token_is_refused() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="names no end token"):
        end_token_ids(model, tokenizer)


def test_end_tokens_outside_the_vocabulary_are_left_out() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [7, 263, 264, 999, -1]
    assert end_token_ids(model, tiny_tokenizer()) == {2, 7, 263}


def test_a_model_without_an_end_token_in_its_vocabulary_is_refused() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [999, 264]
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match=r"The end token 264 is outside the model's vocabulary of 264, so no answer"):
        end_token_ids(model, tokenizer)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("family", "rope", "expected"),
    [
        ("llama", {"rope_type": "default"}, 512),
        ("phi3", LONGROPE, 64),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, 512),
        ("llama", {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 128}, 128),
        # These have one rotation for all lengths.
        ("llama", {"rope_type": "linear", "factor": 2.0}, 512),
        ("llama", {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
    ],
)
def test_positions_end_where_the_rotation_would_change_with_the_batch(
    family: str, rope: dict[str, Any], expected: int
) -> None:
    config = tiny_config(family)
    changes: dict[str, Any] = {"rope_parameters": rope | {"rope_theta": 10000.0}}
    if family == "phi3":
        changes["original_max_position_embeddings"] = 64
    base = AutoModelForCausalLM.from_config(type(config)(**(config.to_dict() | changes)))
    policy = Policy(attach_adapter(base.eval(), LoraSpec(rank=4)), tiny_tokenizer(), CPU, base_name="tiny")
    assert policy.max_positions == expected


# The head.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_the_models_own(family: str, tied: bool) -> None:
    policy = tiny_policy(family, torch.float64, tied=tied)
    own_T_V = base_logits(policy.model)[0]
    length = IDS.shape[1]
    with torch.no_grad():
        layout = policy.packed_layout([GroupSpan(0, length, ())])
        logits_T_V = policy.logits(policy.hidden_states(IDS, torch.arange(length)[None], layout)[0])
    torch.testing.assert_close(logits_T_V, own_T_V, rtol=0, atol=1e-10)
    # Random weights go far beyond 3, where Gemma 2 is capped here.
    assert (own_T_V.abs().max() < 3) == (family == "gemma2")


# Log-probs of a micro-batch.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_log_probs_and_entropies_are_those_of_whole_rows(family: str, tied: bool, bias: bool) -> None:
    base = tiny_model(family, dtype=torch.float64, tied=tied)
    if bias:
        base.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 264, dtype=torch.float64), requires_grad=False)
    policy = Policy(attach_adapter(base, LoraSpec(rank=4)), tiny_tokenizer(), CPU, base_name="tiny")
    groups = random_groups()
    for micro in pack(groups, micro_batch_tokens=30):
        logprobs_BT, entropy_BT = policy.logprobs(micro, temperature=0.7, head_chunk_tokens=4)
        assert (logprobs_BT[~micro.mask_BT] == 0).all()
        assert (entropy_BT[~micro.mask_BT] == 0).all()
        assert (logprobs_BT.requires_grad, entropy_BT.requires_grad) == (True, False)
        for b, (p, g) in enumerate(micro.rows):
            prompt, answer = groups[p].group.problem.prompt_ids, groups[p].group.rollouts[g].completion_ids
            with torch.no_grad():
                logits_T_V = policy.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            words = torch.distributions.Categorical(logits=logits_T_V / 0.7)
            mask_T = micro.mask_BT[b]
            expected_T = words.log_prob(torch.tensor(answer))
            torch.testing.assert_close(logprobs_BT[b][mask_T].detach(), expected_T, rtol=0, atol=1e-10)
            torch.testing.assert_close(entropy_BT[b][mask_T], words.entropy(), rtol=0, atol=1e-10)


# What is refused.


def scaled(base: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """A model whose own logits are not its head times its hidden states."""
    forward = base.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    base.forward = changed  # type: ignore[method-assign]
    return base


@pytest.mark.parametrize("change", [lambda z: z / 8, lambda z: 3 * torch.tanh(z / 3), lambda z: z + 0.1])
def test_a_model_that_transforms_its_logits_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    model = attach_adapter(scaled(tiny_model(), change), LoraSpec(rank=4))
    with pytest.raises(ModelError, match=r"The logits of odd-model are not its head times its hidden states"):
        Policy(model, tiny_tokenizer(), CPU, base_name="odd-model")


def test_a_damaged_model_is_refused() -> None:
    base = tiny_model()
    with torch.no_grad():
        base.model.norm.weight[3] = float("nan")
    with pytest.raises(ModelError, match="gives non-finite logits"):
        Policy(attach_adapter(base, LoraSpec(rank=4)), tiny_tokenizer(), CPU, base_name="tiny")


def test_target_modules_that_match_nothing_name_what_there_is() -> None:
    expected = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(
        ModelError, match=rf"lora.target_modules \['query'\] matches no layer; this model has {expected}"
    ):
        attach_adapter(tiny_model(), LoraSpec(target_modules=("query",)))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning")
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_as_target_is_refused(tied: bool) -> None:
    with pytest.raises(ModelError, match=r"lora.target_modules names the head"):
        attach_adapter(tiny_model(tied=tied), LoraSpec(target_modules=("q_proj", "lm_head")))


def test_some_target_modules_only() -> None:
    model = attach_adapter(tiny_model(), LoraSpec(rank=3, target_modules=("q_proj", "v_proj")))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad and "layers.0" in name}
    ends = {".".join(name.split(".")[-4:-2]): shape for name, shape in shapes.items()}
    assert ends == {
        "q_proj.lora_A": (3, 32),
        "q_proj.lora_B": (32, 3),
        "v_proj.lora_A": (3, 32),
        "v_proj.lora_B": (16, 3),
    }


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=r"The tokenizer in .* cannot be read"):
        load_tokenizer(tmp_path)
    shutil.copytree(folder("llama"), tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"The model in .* cannot be loaded"):
        load_base(ModelSpec(tmp_path / "half", "tiny"), CPU)
    (tmp_path / "half" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"The model in .* cannot be loaded"):
        load_base(ModelSpec(tmp_path / "half", "tiny"), CPU)
