"""The table of docs/models.md is what training steps give; each row is a test."""

import capabilities
import pytest
import torch

from octavo.errors import InputError

pytest.importorskip("accelerate", reason="needs accelerate, of the dev extra: pip install -e '.[dev]'")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* deprecated:FutureWarning")
LINES = capabilities.lines_of(capabilities.PAGE.read_text(encoding="utf-8"))


@pytest.mark.long(lambda model: any(name in str(model) for name in ("llama", "mistral", "qwen", "phi3", "gpt_neox")))
@pytest.mark.parametrize("model", capabilities.MODELS)
def test_a_row_is_what_training_steps_give(model, capsys):
    """That of timm's model only where timm is installed, by which it was written."""
    if model == capabilities.VISION:
        pytest.importorskip("timm", exc_type=ImportError)
    assert capabilities.rows_of(LINES)[model] == capabilities.row(model)


def test_the_rest_of_the_table_is_generated_too():
    assert list(capabilities.rows_of(LINES)) == list(capabilities.MODELS)
    assert LINES[:2] == capabilities.head()
    assert LINES[2 + len(capabilities.MODELS) :] == ["", *capabilities.notes()]
    table = "\n".join(capabilities.rows_of(LINES).values())
    assert all(capabilities._sign(note) in table for note in capabilities.NOTES)


def step(**changes):
    gradients = {"one": torch.ones(4), "other": 1e-2 * torch.ones(4)} | changes
    return capabilities.Step(2.0, gradients)


def test_a_step_with_another_loss_or_another_gradient_is_no_yes():
    step().check(step(), **capabilities.EXACT)
    step(one=1.1 * torch.ones(4)).check(step(), **capabilities.FORMAT)
    for wrong in (
        step(other=torch.zeros(4)),
        step(other=-1e-2 * torch.ones(4)),
        step(one=1.3 * torch.ones(4)),
        step(third=torch.ones(1)),
        capabilities.Step(2.1, step().gradients),
    ):
        with pytest.raises(AssertionError):
            wrong.check(step(), **capabilities.FORMAT)
        with pytest.raises(AssertionError):
            wrong.check_bits(step())


def test_a_refusal_without_a_footnote_and_any_other_error_fail(monkeypatch):
    def refuse(model):
        raise InputError("another reason")

    for error, cell in ((ValueError, refuse), (ZeroDivisionError, lambda model: 1 / 0)):
        monkeypatch.setitem(capabilities.COLUMNS, "delayed", cell)
        with pytest.raises(error):
            capabilities.row("`llama`")
