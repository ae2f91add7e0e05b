"""A recorded step of packed documents, whose boundaries stay on the GPU: for every packing the eager step with known ones."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import octavo
from octavo.kernels.attention import flash, reference, variable
from octavo.kernels.attention.pattern import Packing, Pattern, packed_pattern
from octavo.parallel.world import repeat_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FLASH = pytest.mark.skipif(flash.missing() is not None, reason=str(flash.missing()))
B, T, MOST = 2, 512, 40


@pytest.fixture(params=["FlashAttention-2", pytest.param("FlashAttention-4", marks=FLASH), "reference"])
def kernels(request):
    """The module that computes packed documents; the reference where bits are to repeat."""
    before = flash.enabled()
    flash.enable(request.param == "FlashAttention-4")
    if request.param == "reference":
        repeat_bits()
    yield {"FlashAttention-2": variable, "FlashAttention-4": flash, "reference": reference}[request.param]
    flash.enable(before)


def positions(seed):
    """[B, T] on the host, of some documents a sample; some have one."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(B):
        number = int(torch.randint(0, 18, (), generator=generator))
        cuts = sorted((1 + torch.randperm(T - 1, generator=generator)[:number]).tolist())
        rows.append(torch.cat([torch.arange(end - first) for first, end in zip([0, *cuts], [*cuts, T], strict=True)]))
    return torch.stack(rows)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [None, 100])
def test_documents_in_one_call_are_those_of_the_reference(dim, window, kernels):
    generator = torch.Generator("cuda").manual_seed(dim)
    q, k, v, d_out = (torch.randn(B, T, n, dim, device="cuda", generator=generator).bfloat16() for n in (8, 2, 2, 8))
    assert kernels.takes(q, k, causal=True, window=window)
    pattern, fits = packed_pattern(positions(dim).cuda(), B, MOST)
    packed, how = Packing(pattern.ends, pattern.ends, T, T), {"causal": True, "scale": 0.1, "window": window}
    out, lse = kernels.forward(q, k, v, packed=packed, **how)
    grads = kernels.backward(d_out, q, k, v, out, lse, packed=packed, **how)
    given = [x.double().cpu() for x in (q, k, v)]
    ends = Packing(pattern.ends.cpu(), pattern.ends.cpu(), T, T)
    wanted, wanted_lse = reference.forward(*given, packed=ends, **how)
    exact = reference.backward(d_out.double().cpu(), *given, wanted, wanted_lse, packed=ends, **how)
    assert bool(fits)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=1e-3, atol=1e-3)
    for found, right in zip((out, *grads), (wanted, *exact), strict=True):
        assert (found.cpu().double() - right).norm() <= 2e-2 * right.norm()


def made(adapters):
    """A small decoder in FP8, of heads that the kernels take; adapters: frozen, with LoRA."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=T,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    lora = octavo.LoRA(rank=4, targets="all-linear", base="fp8") if adapters else None
    recipe = octavo.recipe.DelayedScaling(amax_history_len=4)
    model = octavo.transform(model, recipe, lora=lora)

    def loss(ids, places):
        with octavo.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return model(input_ids=ids, labels=ids, position_ids=places, max_documents=MOST).loss

    return [parameter for parameter in model.parameters() if parameter.requires_grad], loss


@pytest.mark.parametrize("adapters", [False, True])
def test_a_recorded_step_trains_each_packing_as_an_eager_one(adapters, kernels):
    runs = []
    for recorded, on_gpu in ((True, True), (False, True), (False, False)):
        parameters, loss = made(adapters)
        step = octavo.graphed(loss, parameters) if recorded else lambda *given, loss=loss: backward(loss, given)
        optimizer, found = torch.optim.AdamW(parameters, lr=1e-3), []
        generator = torch.Generator("cuda").manual_seed(1)
        for number in range(9):
            ids = torch.randint(512, (B, T), device="cuda", generator=generator)
            places = positions(number)
            value = step(ids, places.cuda() if on_gpu else places)
            found.append((value.item(), [parameter.grad.clone() for parameter in parameters]))
            if kernels is reference:  # others' roundings would grow with the steps
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        runs.append(found)
        if recorded:
            assert step._recorded is not None
            with pytest.raises(octavo.errors.InputError, match="was recorded with inputs"):
                step(ids[:1], places[:1].cuda())
            assert step(ids, torch.zeros_like(ids)).isnan()  # more documents than max_documents
    graph, eager, known = runs
    for number, (one, other, host) in enumerate(zip(graph, eager, known, strict=True)):
        if kernels is reference:
            assert one[0] == other[0], number
            assert all(map(torch.equal, one[1], other[1])), number
        for a, b in ((one, other), (other, host)):
            assert a[0] == pytest.approx(b[0], rel=5e-3), number
            squares = [
                ((x.double() - y.double()).square().sum(), y.double().square().sum()) for x, y in zip(a[1], b[1], strict=True)
            ]
            differing, whole = (float(sum(part)) for part in zip(*squares, strict=True))
            assert (differing / whole) ** 0.5 < (0.2 if kernels is reference else 0.1), number


def backward(loss, given):
    value = loss(*given)
    value.backward()
    return value.detach()


def test_the_pattern_of_the_gpu_is_that_of_the_host():
    places = positions(3)
    pattern, fits = packed_pattern(places.cuda(), B, MOST)
    assert isinstance(pattern, Pattern)
    assert bool(fits)
    host, _ = packed_pattern(places, B, MOST)
    assert pattern.ends.dtype == torch.int32
    assert pattern.ends.tolist() == host.ends.tolist()
