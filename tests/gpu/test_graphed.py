"""`octavo.graphed`: what the graph computes is what the loop computes, to the bit."""

import pytest
import torch

import octavo
from octavo.errors import InputError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RECIPES = {
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=4),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "bf16": None,
}


def setting(recipe):
    torch.manual_seed(0)
    shape = (128, 256, 2)
    model = torch.nn.Sequential(
        *(octavo.nn.TransformerLayer(*shape, self_attn_mask_type="no_mask", device="cuda") for _ in range(2))
    )

    def loss(x, y):
        with torch.autocast("cuda", torch.bfloat16), octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            return (model(x).float() - y).square().mean()

    batches = [(torch.randn(4, 33, 128, device="cuda"), torch.randn(4, 33, 128, device="cuda")) for _ in range(8)]
    return model, loss, batches, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", RECIPES)
def test_the_graph_repeats_the_loop(name):
    losses, weights = [], []
    for graph in (False, True):
        model, loss, batches, optimizer = setting(RECIPES[name])
        step = octavo.graphed(loss, model.parameters(), warmup=3 if graph else 100)
        own = []
        for batch in batches:
            own.append(step(*batch).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(own)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *weights))
    assert len(set(losses[0])) == len(losses[0])


def test_other_shapes_are_refused():
    model, loss, batches, optimizer = setting(None)
    step = octavo.graphed(loss, model.parameters(), warmup=1)
    for batch in batches[:2]:
        step(*batch)
        optimizer.zero_grad()
    with pytest.raises(InputError, match="drop the last, smaller batch"):
        step(*(tensor[:2] for tensor in batches[2]))
