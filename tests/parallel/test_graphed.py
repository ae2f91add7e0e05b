"""`octavo.graphed` on a CPU, where every call is eager: the contract that a GPU's graph is held to in tests/gpu."""

import itertools

import pytest
import replicas
import torch

import octavo
import ranks
from octavo.errors import InputError


def setting():
    torch.manual_seed(0)
    model = octavo.nn.TransformerLayer(32, 64, 2, self_attn_mask_type="no_mask")
    recipe = octavo.recipe.DelayedScaling(amax_history_len=3)

    def loss(x, y):
        with octavo.fp8_autocast(fp8_recipe=recipe):
            return (model(x) - y).square().mean()

    batches = [(torch.randn(2, 5, 32), torch.randn(2, 5, 32)) for _ in range(5)]
    return model, loss, batches, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_steps_are_those_of_the_plain_loop():
    model, loss, batches, optimizer = setting()
    wanted = []
    for batch in batches:
        value = loss(*batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(value.item())
    weights = [parameter.detach().clone() for parameter in model.parameters()]

    model, loss, batches, optimizer = setting()
    step = octavo.graphed(loss, model.parameters(), warmup=2)
    for batch, value in zip(batches, wanted, strict=True):
        found = step(*batch)
        assert not found.requires_grad
        assert found.item() == value
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), weights))


def test_gradients_of_an_earlier_call_are_not_added_to():
    model, loss, batches, _ = setting()
    step = octavo.graphed(loss, model.parameters())
    step(*batches[0])
    with pytest.raises(InputError, match=r"adds to none: call optimizer.zero_grad\(set_to_none=True\) before it"):
        step(*batches[1])


def test_one_call_at_least_is_eager():
    with pytest.raises(InputError, match=r"warmup = 0: at least 1 call must run before one is recorded \(usual: 3\)"):
        octavo.graphed(torch.sum, [], warmup=0)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda y: y, r"a tensor of shape \(2, 4\) from the loss: return one number, such as loss\.mean\(\)"),
        (lambda y: (y.sum(), y), r"got tuple, not a tensor from the loss"),
        (lambda y: y.sum().item(), r"got float, not a tensor"),
        (lambda y: y.sum().detach(), r"a loss without a gradient: call it outside of torch\.no_grad\(\)"),
    ],
    ids=["several", "tuple", "number", "detached"],
)
def test_a_loss_is_one_number_with_a_gradient(result, message):
    model = torch.nn.Linear(3, 4)
    step = octavo.graphed(lambda x: result(model(x)), model.parameters())
    with pytest.raises(InputError, match=message):
        step(torch.ones(2, 3))


def test_behind_the_warm_up_inputs_keep_their_shapes_and_dtypes():
    """As a GPU's recording does, so that what runs here runs there."""
    model = torch.nn.Linear(3, 4)
    step = octavo.graphed(lambda x: model(x.float()).sum(), model.parameters(), warmup=2)
    for rows in (2, 5, 4):
        step(torch.ones(rows, 3))
        model.zero_grad()
    for other in (torch.ones(2, 3), torch.ones(4, 3, dtype=torch.float64)):
        with pytest.raises(InputError, match=r"recorded with inputs of .*4, 3.* and got .*: drop the last, smaller batch"):
            step(other)
    step(torch.ones(4, 3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (2.0, "input 1 of a graphed step is float, and a graph repeats the value at its recording: give tensors"),
        (torch.ones(2, 3, requires_grad=True), r"input 1 .*of shape \(2, 3\), requires a gradient.*: give its \.detach\(\)"),
    ],
    ids=["number", "gradient"],
)
def test_an_input_that_a_replay_would_not_follow_is_refused(given, message):
    model = torch.nn.Linear(3, 4)
    step = octavo.graphed(lambda x, y: model(x * y).sum(), model.parameters())
    with pytest.raises(InputError, match=message):
        step(torch.ones(2, 3), given)


def checkpointed(model, x):
    return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)


def compiled(model, x):
    return torch.compile(model, backend="aot_eager")(x)


@pytest.mark.parametrize("run", [torch.nn.Module.__call__, checkpointed, compiled])
@pytest.mark.parametrize("kind", [torch.nn.Linear, octavo.nn.LayerNormLinear])
def test_a_loss_that_trains_other_parameters_is_refused(run, kind):
    """A replay would leave their gradients None, and ranks would not average them."""
    model = torch.nn.Sequential(kind(16, 16), kind(16, 16))
    found = len([*model[1].parameters()])

    def loss(x):
        return run(model, x).float().square().mean()

    step = octavo.graphed(loss, model[0].parameters())
    with pytest.raises(InputError, match=rf"trains {found} tensors that are not among the {found} parameters.*requires_grad_"):
        step(torch.ones(2, 16))
    assert all(parameter.grad is None for parameter in model.parameters())
    model[1].requires_grad_(False)
    step(torch.ones(2, 16))
    model[1].requires_grad_(True)
    model.zero_grad()
    octavo.graphed(loss, model.parameters())(torch.ones(2, 16))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_leaves_that_the_loss_makes_are_its_own():
    """A penalty of gradients has one, and so has the dummy of a reentrant checkpoint; a tensor from outside has not."""
    model, prompt = torch.nn.Linear(3, 4), torch.zeros(3, requires_grad=True)

    def penalty(x):
        between = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(between).square().sum(), between, create_graph=True)
        return slope.square().mean()

    def hidden(x):
        dummy = torch.ones(1, requires_grad=True)
        return torch.utils.checkpoint.checkpoint(lambda x, _: model(x), x, dummy, use_reentrant=True).mean()

    for loss in (penalty, hidden):
        step = octavo.graphed(loss, model.parameters(), warmup=1)
        for _ in range(3):
            step(torch.ones(2, 3))
            assert model.weight.grad is not None
            model.zero_grad()
    step = octavo.graphed(lambda x: model(x + prompt).mean(), model.parameters())
    step(torch.ones(2, 3))
    model.zero_grad()
    with pytest.raises(InputError, match=r"trains 1 tensors .*, the first of shape \(3,\)"):
        step(torch.ones(2, 3))
    step = octavo.graphed(lambda x: model(x + prompt).mean(), [*model.parameters(), prompt])
    prompt.grad = None
    for _ in range(2):
        step(torch.ones(2, 3))
        model.zero_grad()
        prompt.grad = None


def test_frozen_parameters_alone_are_refused():
    model = torch.nn.Linear(3, 4).requires_grad_(False)
    with pytest.raises(InputError, match="all 2 parameters are frozen"):
        octavo.graphed(lambda x: model(x).sum(), model.parameters())


def test_parameters_stay_frozen_or_not():
    """A graph repeats the gradients of its recording, and a group averages those that were there when it was made."""
    model = torch.nn.Linear(3, 4)
    step = octavo.graphed(lambda x: model(x).sum(), model.parameters())
    model.bias.requires_grad_(False)
    with pytest.raises(InputError, match=r"\(4,\) was trained when octavo.graphed was called and is frozen now"):
        step(torch.ones(2, 3))
    step = octavo.graphed(lambda x: model(x).sum(), model.parameters())
    step(torch.ones(2, 3))
    model.zero_grad()
    model.bias.requires_grad_(True)
    with pytest.raises(InputError, match=r"\(4,\) was frozen .* and is trained now.*: call octavo.graphed anew"):
        step(torch.ones(2, 3))


def test_a_parameter_alone_is_not_taken_for_its_rows():
    model = torch.nn.Linear(3, 4)
    with pytest.raises(InputError, match=r"and parameters: graphed\(loss, model\.parameters\(\)\)"):
        octavo.graphed(torch.sum, model.weight)


def test_a_group_before_the_ranks_have_joined_is_said(monkeypatch, capsys):
    """torch.distributed.group.WORLD is None then, as the default is."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    octavo.graphed(torch.sum, torch.nn.Linear(3, 4).parameters(), group=torch.distributed.group.WORLD)
    assert "averages no gradients: group = None, and this is one of 2 ranks" in capsys.readouterr().err


def test_a_group_is_one():
    layer = torch.nn.Linear(2, 2)
    for group in (3, torch.distributed.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(InputError, match=r"is not a process group that this rank has joined: give torch.distributed.group"):
            octavo.graphed(layer, layer.parameters(), group=group)


@pytest.mark.long(lambda recipe: recipe == "current")
@pytest.mark.parametrize("recipe", replicas.RECIPES)
def test_replicas_are_those_of_distributed_data_parallel(recipe):
    """20 steps on two ranks with other initial weights: gradients, losses and weights to the bit, since halves are exact."""
    own = ranks.run(2, replicas.train, "graphed", recipe, steps=20, large_bytes=10_000)
    theirs = ranks.run(2, replicas.train, "ddp", recipe, steps=20)
    assert own[0][3] == own[1][3]
    assert bool(own[0][3][1]) is (recipe == "delayed")
    assert own[0][0] != own[1][0]
    for (losses, gradients, weights, _), (their_losses, their_gradients, their_weights, _) in zip(own, theirs, strict=True):
        assert losses == their_losses
        for step, their_step in zip(gradients, their_gradients, strict=True):
            assert all(map(torch.equal, step, their_step))
        assert all(map(torch.equal, weights, their_weights))


def test_ranks_join_amaxes_once_a_step():
    assert ranks.run(2, replicas.joins) == [[1, 2]] * 2


def test_shards_keep_their_gradients():
    """FSDP computes with leaves of its own, which are not the parameters; with a group they would be averaged twice."""
    for found in ranks.run(2, replicas.shards):
        assert found.keys() == {"fsdp2", "fsdp1", "fsdp1 flat"}
        for name, (ours, theirs, refusal) in found.items():
            assert ours, name
            assert all(map(torch.equal, ours, theirs)), name
            assert "these parameters are shards, whose gradients are reduced in the backward" in refusal, name


def test_groups_of_gradients_end_where_an_attention_begins():
    found, other = ranks.run(2, replicas.groups)
    assert found == other
    by_size, by_attention, agreed = found
    assert [len(group) for group in by_size] == [4, 4]
    assert [len(group) for group in by_attention] == [3, 4, 1]
    assert [*itertools.chain(*by_size)] == [*itertools.chain(*by_attention)] == [*itertools.chain(*agreed)]
    assert {group[-1].removeprefix("layers.") for group in by_attention[:2]} == {
        f"{layer}.self_attention.proj.weight" for layer in (0, 1)
    }
    assert [len(group) for group in agreed[:1]] == [2]


def test_a_group_is_of_one_dtype():
    assert ranks.run(2, replicas.kinds) == [frozenset((2, 4))] * 2


def test_a_backward_that_failed_leaves_nothing_behind():
    for expectation, kept, found, means in ranks.run(2, replicas.failing):
        assert expectation == [False, True]  # collectives run beside the backward alone
        assert kept == 0
        assert all(map(torch.equal, found, means))


def test_three_ranks_and_none():
    """A third is rounded; without a group every rank has its own weights."""
    joint = ranks.run(3, replicas.train, "graphed", "bf16", steps=1)
    theirs = ranks.run(3, replicas.train, "ddp", "bf16", steps=1)
    assert len({digest for *_, digest in joint}) == 1
    for gradient, wanted in zip(joint[2][1][0], theirs[0][1][0], strict=True):
        torch.testing.assert_close(gradient, wanted)
    alone = ranks.run(2, replicas.train, "alone", "bf16", steps=1)
    assert alone[0][3] != alone[1][3]


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_that_share_memory_are_averaged_once(fails):
    """A gradient can be a view of what the rest of the backward reads, or of another parameter's."""
    for found, wanted, refusal in ranks.run(2, replicas.means, fails):
        for gradient, mean in zip(found, wanted, strict=True):
            torch.testing.assert_close(gradient, mean)
        assert (refusal is not None and "1 of 4 parameters got no gradient" in refusal) is fails


def test_what_would_average_wrongly_is_refused():
    for messages, gradients in ranks.run(2, replicas.refusals):
        assert messages["ddp"] == messages["ddp alone"]
        assert "call the model inside it (model.module)" in messages["ddp"]
        assert "2 of 6 parameters got no gradient, the first of shape (4, 4)" in messages["unused"]
        assert "leave group out, or leave octavo.init out to train replicas" in messages["shards"]
        assert "the loss trains 2 tensors that are not among the 2 parameters of octavo.graphed" in messages["part"]
        assert all(gradients)
