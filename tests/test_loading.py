"""`load`: what is damaged, incomplete or of the wrong kind is refused by name, and nothing draws random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle.folders import Folders, save_tiny
from oracle.models import tiny_head
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import specdec
from specdec.drafters.eagle3 import Eagle3Drafter
from specdec.drafters.lm import LMDrafter
from specdec.drafts import feature_taps, kind_of
from specdec.loading import load_draft, load_target
from specdec.methods import make_growth, method
from specdec.models.eagle3 import default_taps

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folders(made: Folders, tmp_path: Path) -> Folders:
    """Folders that a test may damage."""
    return Folders(*(Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in made))


def change_weights(folder: Path, drop: str | None = None, **tensors: torch.Tensor) -> None:
    """Drop the tensors whose name holds a text, and set others ("__" stands for ".")."""
    path = folder / "model.safetensors"
    state = {name: tensor for name, tensor in load_file(path).items() if drop is None or drop not in name}
    save_file(state | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, path, {"format": "pt"})


def change_config(folder: Path, **fields: object) -> None:
    """Set fields of config.json; `...` removes one."""
    raw = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))


def load_role(folders: Folders, role: str):
    """Loads one of the folders as what it is."""
    if role == "target":
        return load_target(folders.target, "cpu")
    lm, tokenizer = load_target(folders.target, "cpu")
    return load_draft(getattr(folders, role), lm, method("talon"), tokenizer)


# --- tensors of a language model


@pytest.mark.parametrize("role", ["target", "draft"])
def test_missing_tensors(folders: Folders, role: str) -> None:
    change_weights(getattr(folders, role), drop="layers.1.mlp" if role == "target" else "layers.0.mlp.up_proj")
    with pytest.raises(ValueError, match=rf"the {role} '.*' lacks model\.layers\.\d\.mlp.*would write nonsense"):
        load_role(folders, role)


def test_unexpected_tensors(folders: Folders) -> None:
    change_weights(folders.target, model__layers__0__mlp__w3__weight=torch.zeros(2))
    with pytest.raises(ValueError, match=r"has model\.layers\.0\.mlp\.w3\.weight, unknown to its architecture"):
        load_role(folders, "target")


def test_tensors_of_another_shape(folders: Folders) -> None:
    change_weights(folders.target, model__norm__weight=torch.zeros(2))
    with pytest.raises(ValueError, match=r"wrong shape for model\.norm\.weight \(\(2,\), expected \(64,\)\)"):
        load_role(folders, "target")


def test_old_rotary_buffers_are_no_fault(folders: Folders) -> None:
    change_weights(folders.target, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(2))
    assert load_role(folders, "target")


def test_only_a_tied_output_may_be_absent(folders: Folders) -> None:
    change_weights(folders.target, drop="lm_head")
    change_config(folders.target, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        load_role(folders, "target")
    change_config(folders.target, tie_word_embeddings=True)
    lm, _ = load_role(folders, "target")
    assert torch.equal(lm.output_embedding(), lm.embed_tokens.weight)


# --- damaged files


@pytest.mark.parametrize("role", ["target", "draft", "head"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[:5000], lambda data: b"junk" * 50, lambda data: b""], ids=["cut", "junk", "empty"]
)
def test_damaged_safetensors(folders: Folders, role: str, damage: Callable[[bytes], bytes]) -> None:
    path = getattr(folders, role) / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"{path} is damaged or no weights file \(.*\); download or copy it again"):
        load_role(folders, role)


@pytest.mark.parametrize("role", ["target", "draft", "head"])
@pytest.mark.parametrize(
    "data", [b"junk" * 50, b"", b"PK" + b"\0" * 50, b"\x80\x02."], ids=["junk", "empty", "zip", "pickle"]
)
def test_damaged_pytorch_bin(folders: Folders, role: str, data: bytes) -> None:
    folder = getattr(folders, role)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(ValueError, match=rf"{folder / 'pytorch_model.bin'} is damaged"):
        load_role(folders, role)


def test_a_damaged_shard(folders: Folders) -> None:
    (folders.target / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(folders.draft).save_pretrained(folders.target, max_shard_size="30KB")
    next(folders.target.glob("model-00002-of-*.safetensors")).write_bytes(b"junk" * 50)
    with pytest.raises(
        ValueError, match=r"the target '.*target' could not be loaded.*SafetensorError.*copy them again"
    ):
        load_role(folders, "target")


@pytest.mark.parametrize("role", ["target", "draft", "head"])
@pytest.mark.parametrize("data", [b'{"a": "\xff"}', b"{", b"[1]"], ids=["encoding", "json", "list"])
def test_damaged_config(folders: Folders, role: str, data: bytes) -> None:
    path = getattr(folders, role) / "config.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"{path} (is not JSON in UTF-8|holds \[1\]; expected a JSON object)"):
        load_role(folders, role)


# --- a head or a language model


@pytest.mark.parametrize("form", ["safetensors", "bin", "old bin"])
def test_a_head_without_draft_vocab_size(folders: Folders, form: str) -> None:
    change_config(folders.head, draft_vocab_size=...)
    if form != "safetensors":
        state = load_file(folders.head / "model.safetensors")
        torch.save(state, folders.head / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
        (folders.head / "model.safetensors").unlink()
    drafter = load_role(folders, "head")
    assert isinstance(drafter, Eagle3Drafter)
    assert drafter.head.config.draft_vocab_size == tiny_head().config.draft_vocab_size


def test_kinds(folders: Folders) -> None:
    assert [kind_of(folder) for folder in folders] == ["lm", "lm", "eagle3"]
    assert isinstance(load_role(folders, "draft"), LMDrafter)


def test_eagle1_and_speculators_get_their_message(folders: Folders) -> None:
    change_config(folders.head, draft_vocab_size=...)
    state = {"fc.weight": torch.zeros(8, 16), "layers.0.mlp.up_proj.weight": torch.zeros(8, 8)}
    save_file(state, folders.head / "model.safetensors")
    with pytest.raises(ValueError, match="EAGLE-1 or EAGLE-2 head"):
        load_role(folders, "head")
    change_config(folders.head, speculators_model_type="eagle3")
    with pytest.raises(ValueError, match="speculators format"):
        load_role(folders, "head")


def test_a_head_as_the_target(folders: Folders) -> None:
    with pytest.raises(
        ValueError, match=r"the target '.*head' is an EAGLE-3 head, which only drafts; give it as the draft"
    ):
        load_target(folders.head, "cpu")


def test_offsets_lead_to_target_ids(folders: Folders) -> None:
    """d2t holds offsets: draft id 2 is target id 2 + 5, not 5."""
    config = tiny_head().config
    ids = torch.tensor([1, 4, 7, 9])
    change_config(folders.head, draft_vocab_size=4)
    change_weights(
        folders.head,
        d2t=torch.tensor([1, 3, 5, 6]),
        t2d=torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True),
        lm_head__weight=torch.zeros(4, config.hidden_size),
    )
    drafter = load_role(folders, "head")
    assert drafter.head.target_ids(torch.arange(4)).tolist() == [1, 4, 7, 9]
    assert drafter.target_ids(torch.tensor([[3, 0]])).tolist() == [[9, 1]]


# --- what a head says of itself


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (None, r"specdec in .*config\.json is None; expected an object"),
        ([1], r"specdec in .*config\.json is \[1\]; expected an object"),
        ({"taps": "abc"}, r"specdec\.taps in .*config\.json is 'abc'; expected a list"),
        ({"taps": [0, 1, "2"]}, r"specdec\.taps in .*config\.json is \[0, 1, '2'\]; expected a list of layer ids"),
        ({"taps": [0, 1, 9]}, r"expected 3 ids from 0 to 2 as specdec\.taps in .*head/config\.json"),
        ({}, r'name the taps yourself, as "specdec": \{"taps": \[\.\.\.\]\} in the config\.json of the head'),
        ({"taps": [0, 1, 2], "rank_acceptance": 3}, r"specdec\.rank_acceptance in .* is 3; expected a list"),
        (
            {"taps": [0, 1, 2], "rank_acceptance": ["a"]},
            r"specdec\.rank_acceptance in .* is \['a'\]; expected .* 0 to 1",
        ),
        ({"taps": [0, 1, 2], "rank_acceptance": [1.5]}, r"is \[1\.5\]; expected a list of chances from 0 to 1"),
    ],
)
def test_own_fields(folders: Folders, own: object, message: str) -> None:
    change_config(folders.head, specdec=own)
    with pytest.raises(ValueError, match=message):
        load_role(folders, "head")


def test_own_fields_are_read(folders: Folders) -> None:
    change_config(folders.head, specdec={"taps": [0, 1, 2], "rank_acceptance": [0.5, 0]})
    drafter = load_role(folders, "head")
    assert (drafter.taps, drafter.rank_acceptance) == ((0, 1, 2), (0.5, 0))


def test_sizes_of_another_type(folders: Folders) -> None:
    change_config(folders.head, num_attention_heads="4")
    with pytest.raises(ValueError, match=r"num_attention_heads in .*config\.json is '4'; expected a positive integer"):
        load_role(folders, "head")


def test_the_rule_for_taps() -> None:
    assert default_taps(32) == (2, 16, 29)
    assert feature_taps({}, 32, 3) == (2, 16, 29)


# --- arguments


@pytest.mark.parametrize("draft", ["", " ", {}, 5, [1], Eagle3Drafter])
def test_drafts_of_another_kind(folders: Folders, draft: object) -> None:
    with pytest.raises(ValueError, match=r"the draft is .*; expected a folder"):
        specdec.load(folders.target, draft=draft, device="cpu")


@pytest.mark.parametrize("target", ["", {}, 5, None])
def test_targets_of_another_kind(target: object) -> None:
    with pytest.raises(ValueError, match=r"the target is .*; expected a folder"):
        specdec.load(target, method="ar")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("talon", {"budget": "8"}, "talon: budget is '8'; expected int"),
        ("talon", {"budget": 8.0}, "talon: budget is 8.0; expected int"),
        ("talon", {"budget": float("nan")}, "talon: budget is nan; expected int"),
        ("talon", {"budget": True}, "talon: budget is True; expected int"),
        ("talon", {"budget": None}, "talon: budget is None; expected int"),
        ("talon", {"max_depth": "3"}, "talon: max_depth is '3'; expected int | None"),
        ("talon", {"mu": "a"}, "talon: mu is 'a'; expected float"),
        ("talon", {"mu": True}, "talon: mu is True; expected float"),
        ("talon", {"mu": float("nan")}, "talon: mu is nan; expected a number in (0, 1]"),
        ("talon", {"min_mass": float("nan")}, "talon: min_mass is nan; expected a number in [0, 1)"),
        ("eagle3", {"depth": "2"}, "eagle3: depth is '2'; expected int"),
        ("sd", {"length": 1.5}, "sd: length is 1.5; expected int"),
    ],
)
def test_option_types(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_growth(method(name), options, plan=None)
    assert message in str(caught.value)


def test_option_types_that_fit() -> None:
    growth = make_growth(method("talon"), {"mu": 1, "max_depth": None, "budget": 8}, plan=None)
    assert (growth.mu, growth.max_depth, growth.budget) == (1, None, 8)


@pytest.mark.parametrize(
    ("device", "message"),
    [("meta", "'meta', which computes nothing"), ("xpu", "'xpu', which this torch cannot use"), ("", "expected 'cpu'")],
)
def test_devices(folders: Folders, device: str, message: str) -> None:
    if device == "xpu" and torch.xpu.is_available():
        pytest.skip("this torch can use it")
    with pytest.raises(ValueError, match=message):
        load_target(folders.target, device)


def test_a_draft_without_a_tokenizer(folders: Folders) -> None:
    for path in folders.draft.glob("*token*"):
        path.unlink()
    with pytest.raises(
        ValueError, match=r"only compared with the target's: add its files, or pass the draft as a model"
    ):
        load_role(folders, "draft")
    lm, tokenizer = load_target(folders.target, "cpu")
    model = AutoModelForCausalLM.from_pretrained(folders.draft)
    assert isinstance(load_draft(model, lm, method("talon"), tokenizer), LMDrafter)


@pytest.mark.parametrize("data", [b"junk", b"", b"[1]", b'{"added_tokens": [], "model": {"type": "x"}}'])
def test_a_damaged_tokenizer(folders: Folders, data: bytes) -> None:
    (folders.target / "tokenizer.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"no tokenizer in '.*target': .*pass tokenizer="):
        load_target(folders.target, "cpu")
