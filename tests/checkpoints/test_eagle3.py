"""Heads on disk: what is written is read back, and everything that would draft nonsense is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.checkpoints.eagle3 import draft_vocabulary_maps, load_eagle3, save_eagle3
from specdec.models.eagle3 import Eagle3Config, Eagle3Head

WIDTH, TARGET_WIDTH, VOCAB, DRAFT = 12, 8, 10, 4
IDS = torch.tensor([1, 4, 7, 9])


def make_head(embed_tokens: nn.Embedding | None = None, **changes: Any) -> Eagle3Head:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "target_hidden_size": TARGET_WIDTH,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "intermediate_size": 20,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT,
    }
    head = Eagle3Head(Eagle3Config(**sizes | changes), embed_tokens)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    if head.config.draft_vocab_size == DRAFT:
        head.d2t.copy_(IDS - torch.arange(DRAFT))
        head.t2d.zero_()[IDS] = True
    return head


@pytest.fixture
def embed_tokens() -> nn.Embedding:
    torch.manual_seed(1)
    return nn.Embedding(VOCAB, WIDTH)


@pytest.fixture
def folder(tmp_path: Path, embed_tokens: nn.Embedding) -> Path:
    save_eagle3(make_head(embed_tokens), tmp_path, dtype=torch.float32)
    return tmp_path


def load(folder: Path, embed_tokens: nn.Embedding | None, **changes: Any) -> Eagle3Head:
    options: dict[str, Any] = {"target_hidden_size": TARGET_WIDTH, "vocab_size": VOCAB}
    return load_eagle3(folder, embed_tokens=embed_tokens, **options | changes)


def change_config(folder: Path, **fields: Any) -> None:
    """Set fields of config.json; None removes one."""
    raw = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def change_weights(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Set tensors of model.safetensors ("__" stands for "."); None removes one."""
    state = load_file(folder / "model.safetensors") | {key.replace("__", "."): value for key, value in tensors.items()}
    save_file({key: value for key, value in state.items() if value is not None}, folder / "model.safetensors")


def assert_equal_heads(found: Eagle3Head, expected: Eagle3Head) -> None:
    assert found.config == expected.config
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_round_trip(folder, embed_tokens):
    head = load(folder, embed_tokens)
    assert_equal_heads(head, make_head(embed_tokens))
    assert head.d2t.tolist() == [1, 3, 5, 6]
    assert head.target_ids(torch.arange(DRAFT)).tolist() == [1, 4, 7, 9]  # offsets, not ids
    assert head.embed_tokens is embed_tokens
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_own_embedding_is_saved(tmp_path):
    save_eagle3(make_head(), tmp_path, dtype=torch.float32)
    assert_equal_heads(load(tmp_path, None), make_head())


def test_pytorch_bin(folder, embed_tokens):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_equal_heads(load(folder, embed_tokens), make_head(embed_tokens))


def test_tied_output_rows_come_from_the_target(tmp_path, embed_tokens):
    save_eagle3(make_head(embed_tokens), tmp_path, tied=True, extra={"note": 1})
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    output = torch.randn(VOCAB, WIDTH)
    assert torch.equal(load(tmp_path, embed_tokens, lm_head_weight=output).lm_head.weight, output[IDS])
    with pytest.raises(ValueError, match=r"expected \(10, 12\), but none was given"):
        load(tmp_path, embed_tokens)
    with pytest.raises(ValueError, match=r"expected \(10, 12\), but it is \(10, 8\)"):
        load(tmp_path, embed_tokens, lm_head_weight=torch.randn(VOCAB, TARGET_WIDTH))
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lacks lm_head.weight.*tie_word_embeddings"):
        load(tmp_path, embed_tokens, lm_head_weight=output)


def test_absent_fields_come_from_the_shapes(folder, embed_tokens):
    """D32: sizes that a config.json leaves out or states wrongly."""
    change_config(folder, head_dim=99, num_key_value_heads=None, draft_vocab_size=None, intermediate_size=None)
    assert_equal_heads(load(folder, embed_tokens), make_head(embed_tokens))
    change_config(folder, num_attention_heads=None, head_dim=6, rms_norm_eps=None, max_position_embeddings=None)
    assert_equal_heads(load(folder, embed_tokens), make_head(embed_tokens))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
)
def test_rope_is_the_drafts_own(folder, embed_tokens, fields):
    """D32: the fields moved between versions; the angles equal transformers' rotary module for the same fields."""
    change_config(folder, **fields)
    head = load(folder, embed_tokens, dtype=torch.bfloat16)
    config = LlamaConfig(hidden_size=WIDTH, num_attention_heads=4, head_dim=6, max_position_embeddings=2048, **fields)
    expected = LlamaRotaryEmbedding(config)
    assert torch.equal(head.rotary.inv_freq, expected.inv_freq)
    positions = torch.tensor([[0, 1, 5000]])  # beyond max_position_embeddings
    for found, wanted in zip(head.rope(positions), expected(torch.empty(0), positions), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted)


def test_dtype(folder, embed_tokens):
    """D33: the head takes the dtype it is told; features of another one are cast at its border; d2t stays exact."""
    head = load(folder, embed_tokens, dtype=torch.bfloat16)
    assert head.fuse(torch.randn(2, 3 * TARGET_WIDTH)).dtype == torch.bfloat16
    assert head.d2t.dtype == torch.int64
    assert embed_tokens.weight.dtype == torch.float32
    hidden = head.fuse(torch.randn(1, 1, 3 * TARGET_WIDTH))
    q, k, v = head.project(embed_tokens(torch.tensor([[3]])), hidden, *head.rope(torch.tensor([[0]])))
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16


# --- refusals


def test_missing_files(tmp_path, folder, embed_tokens):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        load(tmp_path / "nowhere", embed_tokens)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor pytorch_model.bin.*holds: config.json"):
        load(folder, embed_tokens)


def test_names(folder, embed_tokens):
    change_weights(folder, midlayer__mlp__up_proj__weight=None, midlayer__mlp__w3__weight=torch.zeros(20, WIDTH))
    with pytest.raises(ValueError, match=r"lacks midlayer.mlp.up_proj.weight and has midlayer.mlp.w3.weight"):
        load(folder, embed_tokens)


def test_a_shape_that_does_not_fit(folder, embed_tokens):
    change_weights(folder, midlayer__self_attn__o_proj__weight=torch.zeros(WIDTH, 25))
    with pytest.raises(ValueError, match=r"o_proj.weight is \(12, 25\), expected \(12, 24\)"):
        load(folder, embed_tokens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators format"),
        ({"transformer_layer_config": {}}, "speculators format"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"fc_norm": True, "norm_output": True}, "fc_norm, norm_output"),
        ({"num_attention_heads": 5}, r"num_attention_heads = 5, which does not divide q_proj's 24 rows"),
        ({"draft_vocab_size": 5}, r"contradicts itself.*'d2t': 4.*5"),
    ],
)
def test_other_dialects_and_contradictions(folder, embed_tokens, fields, message):
    change_config(folder, **fields)
    with pytest.raises(ValueError, match=message):
        load(folder, embed_tokens)


def test_an_eagle2_head(folder, embed_tokens):
    save_file(
        {"fc.weight": torch.zeros(8, 16), "layers.0.mlp.up_proj.weight": torch.zeros(8, 8)},
        folder / "model.safetensors",
    )
    with pytest.raises(ValueError, match="EAGLE-1 or EAGLE-2"):
        load(folder, embed_tokens)


def test_a_head_for_another_target(folder, embed_tokens):
    """D31: widths are compared, never assumed equal."""
    with pytest.raises(ValueError, match=r"target_hidden_size 8.*hidden states are 12 wide"):
        load(folder, embed_tokens, target_hidden_size=12)
    change_config(folder, target_hidden_size=None)
    with pytest.raises(ValueError, match=r"fc of 24 inputs.*hidden states are 7 wide"):
        load(folder, embed_tokens, target_hidden_size=7)
    with pytest.raises(ValueError, match=r"vocabulary of 10 ids, but this target has 11"):
        load(folder, embed_tokens, vocab_size=11)
    with pytest.raises(ValueError, match=r"reads token embeddings of \(10, 12\), but the target's are \(10, 8\)"):
        load(folder, nn.Embedding(VOCAB, TARGET_WIDTH))
    with pytest.raises(ValueError, match=r"no embed_tokens\.weight of its own"):
        load(folder, None)


def test_number_of_features_from_fc(tmp_path, embed_tokens):
    save_eagle3(make_head(embed_tokens, num_features=2), tmp_path)
    assert load(tmp_path, embed_tokens).config.num_features == 2


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("data", [b"", b"junk" * 50, b"PK"])
def test_damaged_weights(folder, embed_tokens, name, data):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{folder / name} is damaged or no weights file \(.+\); download or copy"):
        load(folder, embed_tokens)


@pytest.mark.parametrize("data", [b'{"a": "\xff"}', b"{", b"null"])
def test_damaged_config(folder, embed_tokens, data):
    (folder / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=rf"{folder / 'config.json'} .*JSON"):
        load(folder, embed_tokens)


@pytest.mark.parametrize("value", ["4", 4.0, True, 0, [4]])
def test_sizes_of_another_type(folder, embed_tokens, value):
    change_config(folder, num_attention_heads=value)
    with pytest.raises(ValueError, match=r"num_attention_heads in .*config\.json is .*; expected a positive integer"):
        load(folder, embed_tokens)


# --- d2t (D29)

OFFSETS = torch.tensor([1, 3, 5, 6])
T2D = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True)


def test_offsets_lead_to_the_draft_vocabulary():
    d2t, t2d = draft_vocabulary_maps(OFFSETS, T2D, DRAFT, VOCAB)
    assert torch.equal(torch.arange(DRAFT) + d2t, IDS)
    assert torch.equal(t2d, T2D)
    assert torch.equal(draft_vocabulary_maps(OFFSETS, None, DRAFT, VOCAB)[1], T2D)


def test_equal_sizes_without_a_table_are_the_identity():
    d2t, t2d = draft_vocabulary_maps(None, None, VOCAB, VOCAB)
    assert torch.equal(d2t, torch.zeros(VOCAB, dtype=torch.int64))
    assert bool(t2d.all())


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        (IDS, T2D, r"outside the target's 10 ids.*absolute ids"),
        (torch.tensor([0, 1, 2, 3]), torch.arange(VOCAB) < 4, r"disagree.*absolute ids"),
        (None, T2D, r"4 of the target's 10 ids.*no d2t table"),
        (OFFSETS, ~T2D, "disagree about 10 target ids, 0 first"),
        (torch.tensor([1, 3, 5, 9]), None, "draft id 3 to 12, outside"),
        (torch.tensor([-1, 3, 5, 6]), None, "draft id 0 to -1, outside"),
        (torch.tensor([1, 0, 5, 6]), None, "4 draft ids to only 3 target ids"),
        (OFFSETS.float(), T2D, "d2t is torch.float32"),
        (OFFSETS[:3], T2D, r"\(3,\), expected int64 \(4,\)"),
        (OFFSETS, T2D[:9], r"t2d has shape \(9,\)"),
    ],
)
def test_wrong_tables(d2t, t2d, message):
    with pytest.raises(ValueError, match=message):
        draft_vocabulary_maps(d2t, t2d, DRAFT, VOCAB)
