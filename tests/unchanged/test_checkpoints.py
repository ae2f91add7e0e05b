"""Checkpoints of earlier versions load: weights, moments and FP8 records to the bit, and the run continues as it would have.

What may get other names (a model that moves to Octavo's own blocks) is compared by Hugging Face's names, or by all elements
sorted, and its losses within the rounding of fused layers.
"""

import kept
import pytest
import torch
from bits import machine, stored_tensors

import octavo

SAME_CODE = [name for name in kept.RUNS if kept.family(name) != "mistral"]
"""Runs that continue with the code that wrote them: of Octavo's decoder, or a model's own."""

FUSED = 1e-3
"""Relative: losses of fused layers, which round once where others round twice."""


def assert_losses(name, found):
    """Equal on the machine that recorded them; elsewhere sums are taken in another order, and FP8 rounds some values apart."""
    known = kept.expected(name)
    if machine() == known["machine"] and name in SAME_CODE:
        assert found == known["losses"]
    else:
        assert found == pytest.approx(known["losses"], rel=FUSED)


@pytest.mark.parametrize("name", SAME_CODE)
def test_every_tensor_is_loaded_under_its_name(tmp_path, name):
    """Loaded into a model with other weights and saved again: weights, moments, scales, histories, generators."""
    blocks = "own" if kept.family(name) == "gpt_neox" else "auto"
    model, optimizer = kept.language_model(kept.family(name), seed=11, blocks=blocks)
    before = kept.weights_bits(model)
    octavo.load(kept.checkpoint(name), model, optimizer)
    assert before != kept.weights_bits(model)
    octavo.save(tmp_path / "saved", model, optimizer)
    known, found = kept.expected(name)["tensors"], stored_tensors(tmp_path / "saved")
    assert {kind.partition(".")[0] for kind in known} == {"model", "optimizer", "fp8", "random"}
    found = {key: value for key, value in found.items() if key != "random.0.cuda"}  # of a test that ran on a GPU
    begun = {key for key in found if key.endswith(".begun")} - known.keys()  # records of later versions
    assert len(begun) in (0, sum(key.endswith(".scale") for key in known))
    assert {key: value for key, value in found.items() if key not in begun} == known


@pytest.mark.parametrize("name", kept.RUNS)
def test_weights_and_moments_are_loaded_whatever_they_are_called(name):
    known = kept.expected(name)
    model, optimizer = kept.language_model(kept.family(name), seed=11)
    octavo.load(kept.checkpoint(name), model, optimizer)
    assert kept.weights_bits(model) == known["weights"]
    assert kept.moments_bits(optimizer) == known["moments"]
    assert set(known["moments"]) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("name", kept.RUNS)
def test_a_run_is_exported_by_the_names_of_hugging_face(tmp_path, name):
    kept.place(name, tmp_path)
    assert kept.exported_bits(tmp_path) == kept.expected(name)["exported"]


@pytest.mark.parametrize("name", kept.RUNS)
def test_a_run_continues(tmp_path, name):
    """On as many ranks as wrote it."""
    kept.place(name, tmp_path)
    before = kept.losses(tmp_path)
    kept.train_on(kept.RUNS[name], tmp_path, kept.STEPS)
    found = kept.losses(tmp_path)
    assert found[: kept.SAVED] == before
    assert_losses(name, found[kept.SAVED :])


@pytest.mark.parametrize(("name", "count"), [("llama-2-ranks", 1), ("gpt_neox-2-ranks", 1), ("llama", 2)])
def test_a_run_continues_on_other_ranks(tmp_path, name, count):
    kept.place(name, tmp_path)
    kept.train_on(count, tmp_path, kept.STEPS)
    assert kept.losses(tmp_path)[kept.SAVED :] == pytest.approx(kept.expected(name)["losses"], rel=FUSED)


@pytest.fixture
def vision():
    """A vision transformer with the values of a fixture: `vision(name, dtype)`."""
    pytest.importorskip("timm", exc_type=ImportError)

    def make(name, dtype=torch.bfloat16):
        made = kept.Vision(name, dtype)
        assert octavo.load(kept.checkpoint(name), made.model, made.optimizer) == {"step": kept.SAVED}
        return made

    return make


@pytest.mark.parametrize("name", kept.VISION)
def test_a_vision_transformer_has_its_weights_and_moments(vision, name):
    known, made = kept.expected(name), vision(name, torch.float32)
    assert kept.weights_bits(made.model) == known["weights"]
    assert kept.moments_bits(made.optimizer) == known["moments"]
    torch.testing.assert_close(made.logits().cpu(), torch.tensor(known["logits"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", kept.VISION)
def test_a_vision_transformer_continues(vision, name):
    """In float32, where the moments show beyond any rounding, and in FP8."""
    known, steps = kept.expected(name), range(kept.SAVED, kept.STEPS)
    made = vision(name, torch.float32)
    found = [made.step(step) for step in steps]
    assert found == pytest.approx(known["losses_float32"], rel=1e-4)
    assert found != pytest.approx(known["losses_float32_without_moments"], rel=1e-3)
    made = vision(name)
    # The classifier was in FP8 beside timm's blocks, and is in bf16 beside Octavo's.
    assert [made.step(step) for step in steps] == pytest.approx(known["losses"], rel=3 * FUSED)
