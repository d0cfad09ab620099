"""Features are the target's own hidden states, and what is read back is what was recorded."""

from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.models.eagle3 import default_taps
from specdec.training.data import read_rows
from specdec.training.features import FeatureStore, target_features

TAPS = (2, 4, 5)


@pytest.fixture
def rows(text, tokenizer):
    return read_rows(text, tokenizer)


def test_taps_are_the_inputs_of_the_named_layers(target):
    """D31: bit-equal to output_hidden_states[k], the input of layer k before its norm; `final` is after the last."""
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    features, final = target_features(target, ids, TAPS)
    expected = target.model(input_ids=ids, output_hidden_states=True)
    assert torch.equal(features, torch.cat([expected.hidden_states[tap] for tap in TAPS], dim=-1))
    assert torch.equal(final, expected.last_hidden_state)
    assert not target.model.layers[2]._forward_pre_hooks


def test_default_taps():
    """D31: SmolLM2 and Llama-3.1-8B; a model for which the rule makes no sense is refused."""
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(32) == (2, 16, 29)
    for layers in (2, 5):
        with pytest.raises(ValueError, match=f"for n = {layers} layers; name the taps"):
            default_taps(layers)


def test_a_batch_is_the_target_forward_row_by_row(target, rows, tmp_path):
    store = FeatureStore(tmp_path, rows, target, TAPS)
    picked = [0, len(rows) - 1, 9]
    batch = store.batch(picked)
    assert store.recorded() == 3
    for slot, index in enumerate(picked):
        row, stop = rows[index], len(rows[index].ids)
        features, final = target_features(target, torch.from_numpy(row.ids.astype(np.int64))[None], TAPS)
        torch.testing.assert_close(batch.features[slot, :stop], features[0], rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(batch.final[slot, :stop], final[0], rtol=2**-7, atol=1e-3)
        assert batch.ids[slot, :stop].tolist() == row.ids.tolist()
        assert not batch.ids[slot, stop:].any()
        assert not batch.features[slot, stop:].any()
        assert (batch.best[slot, stop:] == -1).all()
        best = target.lm_head(final)[0].argmax(-1)[row.prompt_length - 1 : stop - 1]
        assert torch.equal(batch.best[slot, row.prompt_length - 1 : stop - 1], best)
        assert (batch.best[slot, : row.prompt_length - 1] == -1).all()
        assert batch.best[slot, stop - 1] == -1


def test_rows_are_recorded_once(target, rows, tmp_path):
    first = FeatureStore(tmp_path, rows, target, TAPS).batch([3, 1])
    without_target = FeatureStore(tmp_path, rows, target, TAPS)
    without_target._record = lambda indices: pytest.fail("recorded twice")
    again = without_target.batch([1, 3])
    assert torch.equal(first.features[1, : first.length[1]], again.features[0, : again.length[0]])
    size = sum(path.stat().st_size for path in tmp_path.iterdir() if path.suffix != ".json")
    assert size == FeatureStore.disk_bytes(rows, 32, len(TAPS)) + len(rows)


def test_another_text_or_taps_are_refused(target, rows, tmp_path):
    FeatureStore(tmp_path, rows, target, TAPS)
    with pytest.raises(ValueError, match="another text, target or taps"):
        FeatureStore(tmp_path, rows[1:], target, TAPS)
    with pytest.raises(ValueError, match="another text, target or taps"):
        FeatureStore(Path(tmp_path), rows, target, (1, 4, 5))
