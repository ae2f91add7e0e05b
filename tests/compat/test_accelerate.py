"""Accelerate's FP8 by Transformer Engine and Lightning's plug-in, around the layers of the shim: training, saving, resuming.

Lightning is tested where it is installed.
"""

import contextlib
import copy
import importlib.util
import subprocess
import sys

import pytest
import torch
from torch import nn

import command_lines
import octavo
from octavo.compat.migrate.script import read
from octavo.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that this project does not choose

RECIPE = {"fp8_format": "HYBRID", "amax_history_len": 4, "amax_compute_algo": "max"}


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32))


def batches():
    torch.manual_seed(2)
    return torch.randn(6, 16, 32).unbind()


def loss_of(model, x):
    return (model(x) - x).square().mean()


def by_hand(te, *, evaluated=False):
    """Losses of a loop with the same layers and recipe, and of an evaluation in FP8 or not."""
    model = copy.deepcopy(network())
    for name, module in list(model.named_children()):
        if isinstance(module, nn.Linear | nn.LayerNorm):
            made = te.Linear(module.in_features, module.out_features) if name != "1" else te.LayerNorm(64)
            made.load_state_dict(module.state_dict(), strict=False)
            setattr(model, name, made)
    recipe = _recipe()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x in batches():
        with torch.autocast("cpu", torch.bfloat16), te.fp8_autocast(fp8_recipe=recipe):
            loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), te.fp8_autocast(enabled=evaluated, fp8_recipe=recipe):
        return losses, loss_of(model, batches()[0]).item()


@pytest.mark.parametrize("settings", [None, {"margin": 1}])
def test_composers_calls(te, settings):
    """Its context around forward and backward: losses are those of a loop by hand."""
    from transformer_engine.common.recipe import DelayedScaling, Format

    settings = settings or {"fp8_format": Format.HYBRID, "amax_history_len": 16, "amax_compute_algo": "max"}
    found = []
    for composers in (True, False):
        torch.manual_seed(0)
        model = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x in batches():
            with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(**settings)), contextlib.ExitStack() as stack:
                if composers:
                    stack.enter_context(te.onnx_export(enabled=True))
                loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    assert found[0] == found[1]
    with pytest.raises(InputError, match="onnx_export: enabled"):
        te.onnx_export("yes").__enter__()


def _recipe():
    from transformer_engine.common.recipe import DelayedScaling, Format

    return DelayedScaling(**RECIPE | {"fp8_format": Format.HYBRID})


class Training:
    """A model, prepared by a new Accelerator."""

    def __init__(self, **options):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState
        from accelerate.utils import TERecipeKwargs

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        handlers = [TERecipeKwargs(**RECIPE, **options)]
        self.accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=handlers)
        model = network()
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def steps(self, batches):
        losses = []
        for x in batches:
            loss = loss_of(self.model, x)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("evaluated", [False, True])
def test_accelerate_trains_as_a_loop_with_the_same_layers(te, evaluated):
    wanted, last = by_hand(te, evaluated=evaluated)
    training = Training(use_autocast_during_eval=evaluated)
    assert isinstance(training.model[0], te.Linear)
    assert isinstance(training.model[1], te.LayerNorm)
    assert training.steps(batches()) == wanted
    training.model.eval()
    with torch.no_grad():
        assert loss_of(training.model, batches()[0]).item() == last


def test_accelerate_resumes_to_the_bit(te, tmp_path):
    half = Training()
    half.steps(batches()[:3])
    half.accelerator.save_state(tmp_path / "state", safe_serialization=False)
    wanted = half.steps(batches()[3:])
    resumed = Training()
    resumed.accelerator.load_state(tmp_path / "state")
    scales = octavo.fp8.inspect(resumed.model[0])
    assert all(bool((record["amax_history"] > 0).any()) for record in scales.values())
    assert resumed.steps(batches()[3:]) == wanted


def test_mxfp8_is_refused_by_name(te):
    with pytest.raises(ValueError, match="Octavo has no MXFP8: use Float8BlockScaling"):
        Training(use_mxfp8_block_scaling=True)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("amax_history_len=0", "TERecipeKwargs(amax_history_len=0): a history has at least 1 step"),
        ("margin=99", "TERecipeKwargs(margin=99): scales are divided by 2^margin"),
        ("fp8_format='E5M2'", "TERecipeKwargs: fp8_format E5M2 is not supported: use HYBRID or E4M3."),
        ("override_linear_precision=(False, False, True)", "TERecipeKwargs: override_linear_precision=(False, False, True) "),
        ("amax_history_len='many'", "TERecipeKwargs(amax_history_len='many'): Input should be a valid integer"),
        ("use_mxfp8_block_scaling=True", "TERecipeKwargs(use_mxfp8_block_scaling=True): Octavo has no MXFP8"),
    ],
)
def test_a_refused_argument_is_one_message_with_the_key_of_the_script(tmp_path, argument, told):
    (tmp_path / "train.py").write_text(
        "import torch\nfrom accelerate import Accelerator\nfrom accelerate.utils import TERecipeKwargs\n"
        f"handlers = [TERecipeKwargs({argument})]\n"
        "accelerator = Accelerator(mixed_precision='fp8', cpu=True, kwargs_handlers=handlers)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(16, 16))\n"
        "model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))\nmodel(torch.ones(16, 16))\n"
    )
    script = read(tmp_path / "train.py")
    assert [use.name for use in script.uses if use.row.status == "absent"][-1].startswith("accelerate.utils.TERecipeKwargs(")
    code, out, err = (started if argument == "margin=99" else forked)(tmp_path)
    assert (code, out) == (2, "")
    assert f"accelerate.utils.{told}" in err.splitlines()[-1]
    assert "Traceback" not in err


def started(folder):
    """Exit code, stdout and stderr of `python -m octavo.compat train.py`."""
    command = [sys.executable, "-W", "ignore", "-m", "octavo.compat", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def forked(folder):
    """The same of a process with everything imported: a start takes seven seconds."""
    process = command_lines.CommandLine(command_lines.compat, folder / "process", [str(folder / "train.py")])
    return process.wait(timeout=300), process.stdout, process.stderr


def test_the_global_state_is_that_of_the_innermost_autocast(te):
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as Manager

    recipe = Float8CurrentScaling()
    assert (Manager.is_fp8_enabled(), Manager.get_fp8_recipe(), Manager.get_fp8_group()) == (False, DelayedScaling(), None)
    Manager.reset()
    with te.fp8_autocast(fp8_recipe=recipe):
        assert Manager.is_fp8_enabled()
        assert Manager.get_fp8_recipe() is recipe
        with te.autocast(enabled=False):
            assert not Manager.is_fp8_enabled()
        with pytest.raises(InputError, match="leave the context first"):
            Manager.reset()
    assert not Manager.is_fp8_enabled()
    with pytest.raises(AttributeError, match=r"FP8GlobalStateManager\.global_amax_buffer is not in Octavo's"):
        _ = Manager.global_amax_buffer
    assert not hasattr(Manager, "other")


def test_checks_of_support(te):
    from transformer_engine.common import recipe
    from transformer_engine.pytorch import fp8

    assert fp8.check_fp8_support() == fp8.check_fp8_block_scaling_support() == (True, "")
    assert not fp8.check_mxfp8_support()[0]
    assert not fp8.check_nvfp4_support()[0]
    assert fp8.get_default_fp8_recipe() == recipe.DelayedScaling()
    assert fp8.FP8GlobalStateManager.is_fp8_available() == (True, "")
    fp8.check_recipe_support(recipe.Float8BlockScaling())
    with pytest.raises(RuntimeError, match="no MXFP8"):
        fp8.check_recipe_support(recipe.MXFP8BlockScaling())
    with pytest.raises(RuntimeError, match="no NVFP4"):
        fp8.check_recipe_support(recipe.NVFP4BlockScaling())


def test_contexts_of_a_recomputation_give_the_gradients_of_its_forward(te, capsys):
    from torch.utils.checkpoint import checkpoint
    from transformer_engine.pytorch.distributed import get_activation_recompute_contexts, prepare_te_modules_for_fsdp

    def gradients(run):
        layer = te.Linear(32, 32)
        for step in range(2):
            torch.manual_seed(step)
            x = torch.randn(16, 32, requires_grad=True)
            with te.fp8_autocast(fp8_recipe=_recipe()):
                y = run(layer, x)
            y.sum().backward()
        return x.grad, layer.weight.grad

    torch.manual_seed(3)
    wanted = gradients(lambda layer, x: layer(x))
    torch.manual_seed(3)
    found = gradients(lambda layer, x: checkpoint(layer, x, use_reentrant=False, context_fn=get_activation_recompute_contexts))
    assert all(map(torch.equal, wanted, found))
    prepare_te_modules_for_fsdp(nn.Linear(2, 2))
    assert "prepare_te_modules_for_fsdp has no effect" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_lightning_trains_saves_and_resumes(te, tmp_path):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import TransformerEnginePrecision

    def training():
        precision = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=RECIPE)
        fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
        model = network()
        return fabric, *fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def steps(fabric, model, optimizer, batches):
        losses = []
        for x in batches:
            loss = loss_of(model, x.bfloat16())
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    fabric, model, optimizer = training()
    assert sum(isinstance(module, te.Linear) for module in model.modules()) == 2
    own = te.Linear(32, 32)
    assert own in list(fabric.setup(nn.Sequential(own, nn.Linear(32, 32))).modules())  # not replaced a second time
    steps(fabric, model, optimizer, batches()[:3])
    fabric.save(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
    wanted = steps(fabric, model, optimizer, batches()[3:])
    fabric, model, optimizer = training()
    fabric.load(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
    assert steps(fabric, model, optimizer, batches()[3:]) == wanted


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_lightnings_trainer_resumes_a_model_of_configure_model(te, tmp_path):
    """It loads a checkpoint before it converts layers: those of `configure_model` are Octavo's by then."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import TransformerEnginePrecision
    from torch.utils.data import DataLoader, TensorDataset

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = None, []

        def configure_model(self):
            self.net = network() if self.net is None else self.net

        def training_step(self, batch, number):
            loss = loss_of(self.net, batch[0].bfloat16())
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    data = DataLoader(TensorDataset(torch.cat(batches())), batch_size=16)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)

    def trained(epochs, checkpoint=None):
        precision = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=RECIPE, replace_layers=True)
        trainer = Trainer(max_epochs=epochs, accelerator="cpu", devices=1, plugins=[precision], **quiet)
        model = Model()
        trainer.fit(model, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return model

    whole, half = trained(2), trained(1)
    assert isinstance(whole.net[0], te.Linear)
    resumed = trained(2, tmp_path / "1.ckpt")
    assert half.losses == whole.losses[:6]
    assert resumed.losses == whole.losses[6:]
