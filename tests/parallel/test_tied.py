"""A head with the embedding's weight over two ranks: the gradient of one rank, by autograd's sum; the tie behind a load."""

import pytest
import sharded
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ranks
from octavo.errors import InputError
from octavo.nn import embedding
from octavo.nn.embedding import SharedWeight
from octavo.parallel import world
from octavo.parallel.fsdp import accumulate

SIZES = {"vocab_size": 18, "tie_word_embeddings": True}
MICRO_BATCHES = 2


def gradient(how, labels, *, shares=True, settings=None):
    """(the gradient of the tied weight, how often rows were added to the head's) of a step with accumulation.

    how: "ddp", "fsdp", or None for all samples on this rank.
    """
    if how is not None:
        world.init({})
    if not shares:
        SharedWeight.of = lambda self, weight: weight
    added, run = [], embedding.embedding_backward
    embedding.embedding_backward = lambda *given: added.append(given[-1] is not None) or run(*given)
    if how == "fsdp":
        model = called = sharded.build(torch.float32, None, sizes=SIZES, settings=settings)
    else:
        model = called = sharded.build_whole(torch.float32, SIZES)
    if how == "ddp":
        called = DistributedDataParallel(model)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 18, (MICRO_BATCHES, 4, 12), generator=draw)
    ids = ids if how is None else ids.chunk(2, 1)[dist.get_rank()]
    for index, part in enumerate(ids):
        accumulate(model, last=index == MICRO_BATCHES - 1)
        part = part.to(model.device)
        output = called(input_ids=part, labels=part if labels else None, **({"num_items_in_batch": 80} if labels else {}))
        (output.loss if labels else output.logits.square().mean()).backward()
    assert model.head.weight.grad is model.embedding.weight.grad
    return sharded.full(model.embedding.weight.grad), added


@pytest.mark.parametrize("labels", [True, False], ids=["loss", "logits"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_the_gradient_is_that_of_one_rank(how, labels):
    ((wanted, _),) = ranks.run(1, gradient, None, labels, shares=False)
    for found, added in ranks.run(2, gradient, how, labels):
        assert added == [labels] * MICRO_BATCHES
        # DDP averages sums over ranks, FSDP averages gradients of logits alone.
        found = found * 2 if labels and how == "ddp" else found
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def reloaded(tied):
    """Whether a sharded model has its first weights again, and its tie, after a step and a load of its own state."""
    world.init({})
    model = sharded.build(torch.float32, None, sizes={"vocab_size": 18, "tie_word_embeddings": tied})
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(12).view(1, 12)
    losses = []
    for _ in range(2):
        losses.append(model(input_ids=ids, labels=ids, num_items_in_batch=12).loss)
        losses[-1].backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
                parameter.grad = None
        with pytest.raises(InputError, match="Leave assign out"):
            model.load_state_dict(state, assign=True)
        model.load_state_dict(state)
    return losses[0].item(), losses[1].item(), model.head.weight is model.embedding.weight, "head.weight" in state


@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_model_takes_its_own_state(tied):
    for first, second, one, separate in ranks.run(2, reloaded, tied):
        assert second == first
        assert one == tied
        assert separate != tied
