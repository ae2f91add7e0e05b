"""What the tests of expert parallelism run on every rank."""

import hashlib

import sharded
import torch
import torch.distributed as dist

import first_casts
import octavo
from octavo.checkpoint.writer import collect
from octavo.config import MoeConfig
from octavo.errors import InputError
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import RECIPES
from octavo.fp8.scaling import state_records
from octavo.nn.moe import LayerNormMoE
from octavo.parallel import world

EXPERTS = {
    "model_type": "mixtral", "num_local_experts": 4, "sliding_window": None, "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}  # fmt: skip


QWEN = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [1],
    "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip


def train(degrees, recipe, forced=None, micro_batches=1, dense=False, own_first_casts=False, **options):
    """As `sharded.train` in float32.

    forced: the one expert that every token visits first. dense: a family with such layers. own_first_casts: by Octavo's rule.
    """
    if forced is not None:
        LayerNormMoE._route = lambda self, logits: route_to(forced, logits)
    options |= {"sizes": sharded.SIZES | (QWEN if dense else EXPERTS), "moe": MoeConfig(moe_z_loss_coeff=0.3)}
    run = sharded.train.__wrapped__ if own_first_casts else sharded.train
    return run(degrees, torch.float32, recipe, micro_batches, steps=3, **options)


def train_assigned(degrees, balancing, micro_batches=1):
    """As `train`, by an assignment."""
    options = {"sizes": sharded.SIZES | EXPERTS, "moe": MoeConfig(moe_load_balancing=balancing, moe_z_loss_coeff=0.3)}
    return sharded.train(degrees, torch.float32, None, micro_batches, steps=3, **options)


def route_to(forced, logits):
    """All tokens to one expert, half of them to the next one also, and the others twice to the first."""
    second = torch.arange(len(logits)) % 2 + forced
    chosen = torch.stack((torch.full_like(second, forced), second), 1)
    return logits.softmax(-1).gather(1, chosen), chosen


@first_casts.by_one()
def apart(degrees, recipe):
    """Scales of all experts on this rank, of an autocast that joins none over the ranks."""
    world.init(degrees)
    model = sharded.build(torch.float32, RECIPES[recipe](), sizes=EXPERTS)
    ids = torch.randint(0, 17, (2, 12), generator=torch.Generator().manual_seed(world.state.rank))
    for _ in range(3):
        with fp8_autocast(enabled=True, fp8_recipe=RECIPES[recipe](reduce_amax=False)):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return {name: record for name, record in state_records(model).items() if ".experts." in name and not name.endswith("begun")}


def placed(degrees):
    """Of each matrix of experts: this rank's first row and rows, and elements of the whole that are wrong when gathered."""
    world.init(degrees)
    model = sharded.build(torch.float32, None, sizes=EXPERTS | {"num_local_experts": 6})
    whole = sharded.build_whole(torch.float32, sizes=EXPERTS | {"num_local_experts": 6})
    wrong = {}
    for (name, parameter), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
        wrong[name] = int((sharded.full(parameter) != wanted.detach()).sum())
    return wrong, len(model.layers[0].layernorm_moe.experts.fc1_weight.to_local())


def refusal(degrees, sizes):
    """The message that a build over the ranks ends with."""
    world.init(degrees)
    try:
        sharded.build(torch.float32, None, sizes=sizes)
    except InputError as error:
        return str(error)
    return ""


def trained(degrees, seed=0):
    """A mixture after two steps in FP8, and its optimizer."""
    world.init(degrees)
    model = sharded.build(torch.float32, RECIPES["delayed"](), seed=seed, sizes=EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    steps(model, optimizer, 2)
    return model, optimizer


def steps(model, optimizer, count, first=0):
    """Losses as text; the tokens are shared out over the ranks."""
    losses = []
    for step in range(first, first + count):
        ids = torch.randint(0, 17, (4, 12), generator=torch.Generator().manual_seed(step))
        ids = ids.chunk(world.state.dp_size)[world.state.dp_rank]
        with fp8_autocast(enabled=True, fp8_recipe=RECIPES["delayed"]()):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def hashes(model, optimizer):
    """Of every tensor of the state, whole, but for random states."""
    found = {}
    for name, tensor in collect(model, optimizer).items():
        if not name.startswith("random."):
            found[name] = hashlib.sha256(sharded.full(tensor).contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
    return found


def save(path, degrees):
    """Save: hashes, and the losses that follow."""
    model, optimizer = trained(degrees)
    octavo.save(path, model, optimizer)
    return hashes(model, optimizer), steps(model, optimizer, 2, first=2)


def load(path, degrees):
    """The same after loading into a model that began otherwise."""
    model, optimizer = trained(degrees, seed=5)
    octavo.load(path, model, optimizer)
    return hashes(model, optimizer), steps(model, optimizer, 2, first=2)


def exported(folder, degrees):
    """Export a trained mixture, whose experts are on several ranks."""
    model, _ = trained(degrees)
    octavo.export(model, folder)
    dist.barrier()
    return {name: sharded.full(p) for name, p in model.named_parameters()}
