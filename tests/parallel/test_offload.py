"""When offloaded activations are copied back, and how long their host memory lives."""

import gc
import weakref

import pytest
import torch
from llamas import llama, llama_config

import octavo
from building import built_model
from octavo.errors import InputError
from octavo.parallel import offload

LAYERS = 4


@pytest.fixture(autouse=True)
def every_tensor_is_large(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 0)


def model_of(horizon, recompute):
    return built_model(
        llama_config(num_hidden_layers=LAYERS), dtype=torch.float32, params_dtype=torch.float32, device="cpu", seed=0,
        recompute=recompute, offload=horizon is not None, horizon=horizon or 1,
    )  # fmt: skip


def loss_of(model, seed=0):
    ids = torch.randint(0, model.spec.vocabulary, (2, 9), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, labels=ids).loss


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", [False, True, "selective", "mlp"])
def test_what_is_in_host_memory_is_nowhere_else(recompute, monkeypatch):
    stored, store = [], offload._Offloader.store

    def noted(self, tensor, into):
        stored.append(weakref.ref(tensor))
        return store(self, tensor, into)

    monkeypatch.setattr(offload._Offloader, "store", noted)
    loss = loss_of(model_of(2, recompute))
    assert len(stored) >= 4  # the input of each block at least
    assert [tensor for reference in stored if (tensor := reference()) is not None] == []
    loss.backward()


@pytest.mark.parametrize("recompute", [False, True, "selective", "mlp"])
@pytest.mark.parametrize(
    ("horizon", "expected"),
    [
        (1, "load 3, load 2, end 3, load 1, end 2, load 0, end 1, end 0"),
        (2, "load 3, load 2, load 1, end 3, load 0, end 2, end 1, end 0"),
        (9, "load 3, load 2, load 1, load 0, end 3, end 2, end 1, end 0"),
    ],
)
def test_blocks_are_loaded_ahead(horizon, expected, recompute, monkeypatch):
    events = []

    class Noted(offload._BlockSaved):
        made = 0

        def __init__(self, before):
            super().__init__(before)
            self.number, Noted.made = Noted.made, Noted.made + 1

        def load(self, stream):
            if not self.asked:
                events.append(f"load {self.number}")
            super().load(stream)

    monkeypatch.setattr(offload, "_BlockSaved", Noted)
    model = model_of(horizon, recompute)

    def note_end(number):
        """Backward of a block ends with the gradient of its input."""
        return lambda block, args: args[0].register_hook(lambda grad: events.append(f"end {number}")) and None

    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(note_end(number))
    loss_of(model).backward()
    assert ", ".join(dict.fromkeys(events)) == expected  # a recomputation hooks the same inputs again


@pytest.mark.parametrize("recompute", [False, True, "selective"])
def test_several_graphs_at_a_time(recompute):
    """Two forwards before a backward, and a backward through each of two kept graphs, twice."""
    found = []
    for horizon in (None, 2):
        model = model_of(horizon, recompute)
        first, second = loss_of(model, 1), loss_of(model, 2)
        (first + second).backward(retain_graph=True)
        second.backward()
        first.backward()
        found.append(gradients(model))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backward", [True, False])
def test_host_memory_ends_with_its_graph(backward, monkeypatch):
    alive = weakref.WeakSet()

    class Seen(offload._Saved):
        def __init__(self, *args):
            super().__init__(*args)
            alive.add(self)

    monkeypatch.setattr(offload, "_Saved", Seen)
    model = model_of(2, False)
    gc.disable()  # no cycle holds it
    try:
        loss = loss_of(model)
        assert len(alive) > LAYERS
        if backward:
            loss.backward()
        del loss
        assert not alive
    finally:
        gc.enable()


def test_a_forward_without_gradients_copies_nothing(monkeypatch):
    monkeypatch.setattr(offload, "_Saved", None)
    with torch.no_grad():
        loss_of(model_of(2, False))


def test_the_horizon_is_that_of_init(monkeypatch):
    seen = []
    monkeypatch.setattr("octavo.build.offloaded", lambda run, horizon: seen.append(horizon) or run)
    octavo.init({"sm_activation_offloading": True, "activation_loading_horizon": 3})
    try:
        octavo.transform(llama())
    finally:
        octavo.shutdown()
    assert seen == [3]
    with pytest.raises(InputError, match=r"activation_loading_horizon = 0.*1"):
        octavo.init({"activation_loading_horizon": 0})
