"""Checkpoints of models of any shape between any two layouts: uneven rows, empty shards, heads and words fewer than ranks."""

import itertools
import tempfile
from pathlib import Path

import layouts
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ranks
from octavo.config.degrees import DEGREES, check_composed, fit_degrees
from octavo.errors import InputError


def _all_layouts(most):
    """Every (ranks, degrees) of up to so many ranks."""
    for world in range(1, most + 1):
        for given_degrees in itertools.product(range(world + 1), *[range(1, world + 1)] * 3):
            degrees = dict(zip(DEGREES, given_degrees, strict=True))
            try:
                fit_degrees(**degrees, world_size=world)
                check_composed(degrees["tensor_parallel_degree"], degrees["expert_parallel_degree"])
            except InputError:
                continue
            if layouts.TOKENS % (2 * degrees["context_parallel_degree"]) == 0:
                yield world, degrees


LAYOUTS = list(_all_layouts(4))


@st.composite
def shapes(draw):
    """Keys of `llamas.llama_config`."""
    kind = draw(st.sampled_from(["llama", "qwen3", "gpt_neox", "mixtral", "qwen3_moe"]))
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads if kind == "gpt_neox" else kv_heads * draw(st.integers(1, 4))
    head_dim = 2 * draw(st.integers(1, 5))
    shape = {
        "model_type": kind, "num_hidden_layers": draw(st.integers(1, 2)), "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": heads * draw(st.integers(1, 7)),
        "intermediate_size": 12 * draw(st.integers(1, 4)), "vocab_size": draw(st.integers(2, 70)),
        "tie_word_embeddings": draw(st.booleans()), "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if kind == "gpt_neox":
        shape["hidden_size"] = heads * head_dim
    if kind in ("llama", "qwen3"):
        shape["attention_bias"] = draw(st.booleans())
    if kind in ("mixtral", "qwen3_moe"):
        experts = draw(st.integers(2, 6))
        shape |= {"num_experts_per_tok": draw(st.integers(1, 2))}
        shape |= {"num_local_experts": experts} if kind == "mixtral" else {"num_experts": experts}
    if kind == "qwen3_moe":
        shape |= {"moe_intermediate_size": 12 * draw(st.integers(1, 3)), "mlp_only_layers": draw(st.sampled_from([[], [0]]))}
        if shape["num_hidden_layers"] == 1:
            shape["mlp_only_layers"] = []
    return shape


def _fits(shape, degrees):
    heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"]
    tensor, expert = degrees["tensor_parallel_degree"], degrees["expert_parallel_degree"]
    experts = shape.get("num_local_experts", shape.get("num_experts", 0))
    if heads % tensor or (groups % tensor and tensor % groups):
        return False
    return expert == 1 or (experts > 0 and experts % expert == 0)


@st.composite
def moves(draw):
    """A shape, the layout that saves it and the one that continues, and whether it trains in FP8."""
    shape = draw(shapes())
    fitting = [each for each in LAYOUTS if _fits(shape, each[1])]
    return shape, draw(st.sampled_from(fitting)), draw(st.sampled_from(fitting)), draw(st.booleans())


def check(data, move):
    shape, (size_of, of), (size_to, to), fp8 = move
    case = layouts.Case(shape, data, fp8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        ranks.run(size_of, layouts.saved, of, path, case)
        assert layouts.continued({}, [path], case) == {}
        found = ranks.run(size_to, layouts.continued, to, [path], case)
    assert found == [{}] * size_to


# Each example starts two worlds: shrinking would take minutes.
FEW, MANY = (
    settings(
        max_examples=number, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
    )
    for number in (2, 60)
)


@pytest.mark.long
@FEW
@given(move=moves())
def test_some_shapes_between_two_layouts(data, move):
    check(data, move)


@pytest.mark.long
@pytest.mark.timeout(3000)  # each example starts two worlds
@MANY
@given(move=moves())
def test_many_shapes_between_two_layouts(data, move):
    check(data, move)


@pytest.mark.long(lambda back: back)
@pytest.mark.parametrize(
    ("shape", "of", "to"),
    [
        ({"vocab_size": 5, "tie_word_embeddings": True}, {"tensor_parallel_degree": 4}, {}),
        ({"model_type": "qwen3", "head_dim": 6, "num_key_value_heads": 1}, {}, {"tensor_parallel_degree": 4}),  # norms of 6
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_attention_heads": 8},
            {"tensor_parallel_degree": 4},
            {"tensor_parallel_degree": 2, "expert_parallel_degree": 4},
        ),
    ],
    ids=["ranks without a word", "one shared head and empty shards", "slices and whole experts"],
)
@pytest.mark.parametrize("back", [False, True])
def test_shapes_that_ranks_do_not_divide(data, shape, of, to, back):
    check(data, (shape, (4, to), (4, of), False) if back else (shape, (4, of), (4, to), False))
