"""Several optimizers in a checkpoint: each gets its own states back, in a list, a tuple or a dict."""

import pytest
import torch

import octavo
from octavo.errors import InputError


def parts(seed):
    """A model, AdamW of its first layer, and SGD with momentum of the other, which have stepped."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    first = torch.optim.AdamW(model[0].parameters(), lr=0.01 * (seed + 1))
    second = torch.optim.SGD(model[1].parameters(), lr=0.1 * (seed + 1), momentum=0.9)
    steps(model, first, second)
    return model, first, second


def steps(model, *optimizers):
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        model(torch.rand(8, 4, generator=generator)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("form", [list, tuple, lambda pair: {"b": pair[1], "a": pair[0]}], ids=["list", "tuple", "dict"])
def test_several_optimizers_continue_with_the_same_bits(tmp_path, form):
    model, *optimizers = parts(0)
    octavo.save(tmp_path / "x", model, form(optimizers), epoch=3)
    wanted = steps(model, *optimizers)
    other, *others = parts(1)
    given = form(others)
    if isinstance(given, dict):
        given = dict(reversed(given.items()))
    assert octavo.load(tmp_path / "x", other, given) == {"epoch": 3}
    assert [each.param_groups[0]["lr"] for each in others] == [0.01, 0.1]
    assert all(torch.equal(one, two) for one, two in zip(steps(other, *others), wanted, strict=True))


def test_optimizers_before_their_first_step(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fresh = [torch.optim.AdamW(model[0].parameters()), torch.optim.AdamW(model[1].parameters())]
    octavo.save(tmp_path / "x", model, fresh)
    steps(model, *fresh)
    octavo.load(tmp_path / "x", model, fresh)
    assert [len(each.state) for each in fresh] == [0, 0]


def test_a_list_of_one_is_that_one(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer)
    octavo.save(tmp_path / "x", model, [optimizer])
    fresh = torch.optim.AdamW(model.parameters())
    octavo.load(tmp_path / "x", model, fresh)
    for parameter in model.parameters():
        assert torch.equal(fresh.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_other_optimizers_are_refused_and_nothing_changes(tmp_path):
    model, first, second = parts(0)
    octavo.save(tmp_path / "x", model, [first, second])
    before = first.state[model[0].weight]["exp_avg"].clone()
    model[0].weight.data.zero_()
    for given, said in (
        (first, r"another optimizer: AdamW \+ SGD, and this is AdamW"),
        ([second, first], r"another optimizer: AdamW \+ SGD, and this is SGD \+ AdamW"),
        ({"a": first, "b": second}, r"AdamW \+ SGD, and this is a: AdamW \+ b: SGD"),
        (
            [first, second, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])],
            r"optimizer\[2\] \(SGD\) holds no parameter of this",
        ),
    ):
        with pytest.raises(InputError, match=said):
            octavo.load(tmp_path / "x", model, given)
        assert not model[0].weight.any()
    assert torch.equal(first.state[model[0].weight]["exp_avg"], before)


@pytest.mark.parametrize("call", [octavo.save, octavo.load])
def test_an_optimizer_of_other_parameters_is_refused(tmp_path, call):
    """It has stepped nothing, so it keeps no state that would tell."""
    layer = octavo.nn.Linear(16, 16)
    source = torch.nn.Sequential(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(source.parameters())
    for given, name in ((optimizer, "optimizer"), ([torch.optim.SGD(layer.parameters()), optimizer], r"optimizer\[1\]")):
        with pytest.raises(InputError, match=rf"octavo\.{call.__name__}: {name} \(AdamW\) holds no parameter of this model"):
            call(tmp_path / "x", layer, given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [octavo.save, octavo.load])
def test_what_is_no_optimizer_is_refused_by_name(tmp_path, call):
    model, first, _ = parts(0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(first)
    for given, said in (
        ([], r"optimizer = \[\] names none"),
        ({}, r"optimizer = \{\} names none"),
        (scheduler, r"optimizer is of type ConstantLR, which is not an optimizer"),
        ([first, scheduler], r"optimizer\[1\] is of type ConstantLR"),
        ({"a": first, "b": None}, r"optimizer\['b'\] is of type NoneType"),
        ([first, first], r"0\.weight is in optimizer\[0\] and in optimizer\[1\]"),
        ([first, torch.optim.SGD(model.parameters())], r"0\.weight is in optimizer\[0\] and in optimizer\[1\]"),
        (3, "optimizer is of type int"),
    ):
        with pytest.raises(InputError, match=rf"octavo\.{call.__name__}: {said}"):
            call(tmp_path / "x", model, given)
    with pytest.raises(InputError, match=r"model is of type list: give one module"):
        call(tmp_path / "x", [model], first)
    with pytest.raises(InputError, match=r"path = .* is not a path"):
        call(model, tmp_path / "x", first)
    assert list(tmp_path.iterdir()) == []
