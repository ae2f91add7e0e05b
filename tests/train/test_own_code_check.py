"""Models that keep their code are probed before a run: causal, documents apart, the loss over the targets of the step."""

import contextlib
import re

import pytest
import torch
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    MambaConfig,
    MixtralConfig,
    MptConfig,
    OPTConfig,
    RobertaConfig,
)

from building import built_model
from octavo.cli import main
from octavo.errors import InputError
from octavo.train.own_code_check import check_own_code

VOCAB = 96
CONFIGS = {
    "gpt_neox": GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64,
    ),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0),
    "mixtral": MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    ),
    "opt": OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32,
        max_position_embeddings=64,
    ),
    "falcon": FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
    "bloom": BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2),
    "mpt": MptConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=2, max_seq_len=64),
    "mamba": MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
    "bert": BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64,
    ),
    "roberta": RobertaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=66, is_decoder=True,
    ),
    "bart": BartConfig(
        vocab_size=VOCAB, d_model=32, decoder_layers=2, encoder_layers=2, decoder_attention_heads=2,
        decoder_ffn_dim=64, max_position_embeddings=64, encoder_attention_heads=2, encoder_ffn_dim=64,
    ),
}  # fmt: skip


def model_of(family, **changes):
    config = type(CONFIGS[family]).from_dict(CONFIGS[family].to_dict() | changes)
    return built_model(config, dtype=torch.bfloat16, params_dtype=torch.float32, device="cpu", seed=3, blocks="own")


def probe(model, *, documents):
    check_own_code(model, vocab_size=VOCAB, sequence_length=32, documents=documents, device=torch.device("cpu"))


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "mixtral"])
def test_what_trains_rightly_is_taken_and_left_as_it_was(family):
    model = model_of(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    probe(model, documents=True)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("family", ["opt", "bloom", "mpt", "mamba"])
def test_a_family_that_ignores_position_ids_trains_joined_sequences_only(family):
    model = model_of(family)
    ids = torch.arange(1, 13)[None]
    one, half = (model(input_ids=ids, labels=ids, num_items_in_batch=count).loss.item() for count in (8, 16))
    if one == half:  # as Mamba's of transformers 5.14
        assert family == "mamba"
        with pytest.raises(InputError, match="it is not divided by the targets of the whole step"):
            probe(model, documents=False)
        return
    probe(model, documents=False)
    with pytest.raises(InputError, match=r'data\.packing = "documents": \w+ ignores position_ids.*data\.packing = "join"'):
        probe(model, documents=True)


@pytest.mark.parametrize("family", ["falcon", "gpt_neox", "gpt2", "opt"])
def test_documents_are_refused_where_the_family_joins_them(family):
    """Falcon gives its mask the positions from transformers 5.24 on; the model itself tells which it does here."""
    model = model_of(family).eval()
    ids = torch.randint(1, VOCAB, (1, 24))
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions).logits[:, 10:].float()
        second = model(input_ids=ids[:, 10:]).logits.float()
    reads_the_first = not torch.allclose(together, second, rtol=1e-2, atol=1e-3)
    model.train()
    with pytest.raises(InputError, match="ignores position_ids") if reads_the_first else contextlib.nullcontext():
        probe(model, documents=True)
    assert reads_the_first or family != "opt"
    assert not reads_the_first or family in ("falcon", "opt")


def test_an_encoder_is_refused_and_as_a_decoder_taken():
    with pytest.raises(InputError, match=r"BertLMHeadModel is not causal.*model\.config\.is_decoder = true"):
        probe(model_of("bert"), documents=False)
    probe(model_of("bert", is_decoder=True), documents=False)


def test_a_causal_model_whose_config_says_otherwise_is_refused():
    with pytest.raises(InputError, match=r"GPTNeoXForCausalLM is not causal.*model\.config\.is_causal = true"):
        probe(model_of("gpt_neox", is_causal=False), documents=False)
    probe(model_of("gpt_neox", is_causal=True), documents=False)


def test_a_frozen_embedding_hides_nothing():
    model = model_of("bert")
    model.get_input_embeddings().requires_grad_(False)
    with pytest.raises(InputError, match="not causal"):
        probe(model, documents=False)


def test_a_loss_of_its_own_is_refused():
    with pytest.raises(InputError, match=r"the loss of BartForCausalLM is .* mean cross entropy of the next tokens"):
        probe(model_of("bart"), documents=False)
    for coefficient in (0.5, 1e-4):
        with pytest.raises(InputError, match=r"model\.config\.output_router_logits = false"):
            probe(model_of("mixtral", output_router_logits=True, router_aux_loss_coef=coefficient), documents=False)


def test_a_run_is_refused_before_its_first_step(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=2)
    BertConfig(**CONFIGS["bert"].to_diff_dict() | {"vocab_size": 4096}).save_pretrained(tmp_path / "bert")
    settings = re.sub(r"\[model\.config\]\n.*?(?=\n\[)", "", run.file.read_text(), flags=re.DOTALL)
    run.file.write_text(re.sub(r'(?m)^source = "llama-tiny"', f'source = "{tmp_path / "bert"}"', settings))
    assert main(["train", str(run.file)]) == 2
    assert "bert is no causal language model but an encoder" in capsys.readouterr().err
    assert not list(run.output.glob("checkpoints/*"))
