"""lm-eval's tasks on the model in training: answers are those of transformers, on any ranks; no code is fetched.

What needs lm-eval runs where it is installed (extra `octavo[eval]`).
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

import octavo
import ranks
from chat_templates import save_tokenizer
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.run.metrics import read_metrics
from octavo.train.lm_answers import Answerer, Scored, Scoring

needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs octavo[eval]")


def theirs(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    made = tmp_path_factory.mktemp("source")
    model.save_pretrained(made)
    return made


def questions(count=11):
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(3, 40, (count,), generator=generator).tolist()
    return [Scored(torch.randint(0, 64, (length,), generator=generator).tolist(), 1 + length // 3) for length in lengths]


def answers(folder, degrees):
    octavo.init(degrees)
    model = octavo.transform(AutoModelForCausalLM.from_pretrained(folder), dtype=torch.float32).eval()
    settings = Scoring(model, Path("none"), torch.device("cpu"), 64, 64, 2, lambda: octavo.fp8_autocast(enabled=False))
    texts = questions()
    with torch.no_grad():
        answerer = Answerer(settings)
        scores = answerer.score(texts)
        prompts = [text.ids[:5] for text in texts[:5]]
        return scores, answerer.continued(prompts, [6, 3, 1, 4, 6], lambda number, ids: ids[-1] == 7)


@pytest.mark.long(lambda world, degrees: world == 1 or "context_parallel_degree" in degrees)
@pytest.mark.parametrize(
    ("world", "degrees"), [(1, {}), (2, {}), (2, {"tensor_parallel_degree": 2}), (2, {"context_parallel_degree": 2})]
)
def test_scores_and_greedy_answers_are_those_of_transformers_on_every_rank(world, degrees, folder):
    model = theirs(folder)
    wanted, continued = [], []
    with torch.no_grad():
        for text in questions():
            logits = model(input_ids=torch.tensor([text.ids[:-1]])).logits[0, -text.scored :]
            targets = torch.tensor(text.ids[-text.scored :])
            own = logits.log_softmax(-1).gather(-1, targets[:, None]).sum().item()
            wanted.append((own, bool((logits.argmax(-1) == targets).all())))
        for text, limit in zip(questions()[:5], [6, 3, 1, 4, 6], strict=True):
            ids = text.ids[:5]
            for _ in range(limit):
                ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
                if ids[-1] == 7:
                    break
            continued.append(ids[5:])
    for scores, found in ranks.run(world, answers, folder, degrees):
        assert [value for value, _ in scores] == pytest.approx([value for value, _ in wanted], rel=1e-5)
        assert [greedy for _, greedy in scores] == [greedy for _, greedy in wanted]
        assert found == continued


def tasks_in(folder):
    """Three tasks over thirteen rows: choices, a text, and an answer."""
    rows = [
        {
            "q": "a scale for each",
            "choices": [" tensor", " overflows", " in reach"],
            "a": i % 3,
            "t": "a scale for " * (1 + i % 4),
        }
        for i in range(13)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/rows.jsonl\ntest_split: test\n"
    answer = (
        "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{choices[0]}}'\ngeneration_kwargs:\n"
        "  until: ['.']\n  max_gen_toks: 6\n"
    )
    for name, text in {
        "tiny_choice": "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: a\n"
        "target_delimiter: ''\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n",
        "tiny_text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{t}}'\nmetric_list:\n"
        "  - metric: word_perplexity\n  - metric: bits_per_byte\n",
        "tiny_answer": f"{answer}  do_sample: false\nmetric_list:\n  - metric: exact_match\n",
        "tiny_sampled": f"{answer}  do_sample: true\n  temperature: 0.7\nmetric_list:\n  - metric: exact_match\n",
    }.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{text}")
    hub = "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: a\nmetric_list:\n"
    of_hub = "  - metric: acc\n    hf_evaluate: true\n    aggregation: mean\n    higher_is_better: true\n"
    (folder / "tiny_hub.yaml").write_text(f"task: tiny_hub\n{data}{hub}{of_hub}")
    (folder / "own.py").write_text("import evaluate\nevaluate.load('bleu')\ndef score(*_):\n    return 1.0\n")
    own = "  - metric: !function own.score\n    aggregation: mean\n    higher_is_better: true\n"
    (folder / "tiny_script.yaml").write_text(f"task: tiny_script\n{data}{hub}{own}")
    return folder


def train(file, overrides):
    return octavo.Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train().summary.loss


NAMES = ["tiny_choice", "tiny_text", "tiny_answer"]
EXACT = ["model.dtype=float32", "fp8.enabled=false", "model.config.attention_dropout=0.0", "train.micro_batch=1"]


@needs_harness
@pytest.mark.long
def test_figures_are_those_of_the_harness_with_transformers_and_the_training_is_unchanged(tiny_run, tmp_path):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks = tasks_in(tmp_path)
    asked = [
        f"train.eval=[{', '.join(f'''{chr(34)}lm-eval:{name}{chr(34)}''' for name in NAMES)}]",
        f"train.eval_tasks={tasks}",
    ]
    given = [*EXACT, "model.config.max_position_embeddings=64"]
    one, two, plain = (tiny_run(name, steps=2) for name in ("one", "two", "plain"))
    train(one.file, [*given, *asked, "train.eval_batch=3", "train.eval_every=1"])
    ranks.run(2, train, two.file, [*given, *asked, "train.eval_batch=2"])
    train(plain.file, given)
    records = read_metrics(one.output / "metrics.jsonl")
    assert [r["loss"] for r in records] == [r["loss"] for r in read_metrics(plain.output / "metrics.jsonl")]
    octavo.export(one.output, tmp_path / "out")
    lm = HFLM(pretrained=str(tmp_path / "out"), dtype="float32", device="cpu", batch_size=1)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = evaluator.simple_evaluate(lm, tasks=NAMES, task_manager=manager, bootstrap_iters=0)["results"]
    figures = (
        "tiny_choice/acc",
        "tiny_choice/acc_norm",
        "tiny_text/word_perplexity",
        "tiny_text/bits_per_byte",
        "tiny_answer/exact_match",
    )
    other = read_metrics(two.output / "metrics.jsonl")[-1]
    for figure in figures:
        task, metric = figure.split("/")
        wanted = results[task][f"{metric},none"]
        assert records[-1][f"evaluation/{figure}"] == pytest.approx(wanted, rel=1e-4), figure
        assert other[f"evaluation/{figure}"] == pytest.approx(wanted, rel=1e-3), figure
    assert {key for key in records[-1] if key.startswith("evaluation/")} == {f"evaluation/{figure}" for figure in figures}


@needs_harness
@pytest.mark.long
def test_questions_to_a_model_of_chats_are_written_by_its_template_as_the_harness_writes_them(tiny_run_in, tmp_path, capsys):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer = save_tokenizer(tmp_path / "tokenizer", "chatml")
    turns = [{"role": "user", "content": "a fox?"}, {"role": "assistant", "content": "the lazy dog"}]
    corpus = tmp_path / "chats.jsonl"
    corpus.write_text("".join(f"{json.dumps({'messages': turns})}\n" for _ in range(24)))
    run = tiny_run_in(tmp_path / "run", corpus=corpus, steps=1)
    run.file.write_text(run.file.read_text().replace("vocab_size = 300\n", f'tokenizer = "{tokenizer}"\n'))
    tasks = tasks_in(tmp_path)
    shots = "description: 'answer in short'\nfewshot_split: test\nnum_fewshot: 2\n"
    for name in ("tiny_choice", "tiny_answer"):
        (tasks / f"{name}.yaml").write_text((tasks / f"{name}.yaml").read_text() + shots)
    answer = (tasks / "tiny_answer.yaml").read_text().replace("tiny_answer", "tiny_likelihood")
    answer = (
        answer.replace("generate_until", "loglikelihood").replace("exact_match", "perplexity").partition("generation_kwargs")
    )
    (tasks / "tiny_likelihood.yaml").write_text(f"{answer[0]}metric_list:\n  - metric: perplexity\n{shots}")
    asked = [*NAMES, "tiny_likelihood"]
    names = [f"lm-eval:{name}" for name in asked]
    given = [
        *EXACT,
        "model.config.max_position_embeddings=256",
        "model.config.vocab_size=512",
        "model.config.initializer_range=0.3",
        f"train.eval={json.dumps(names)}",
    ]
    train(run.file, [*given, f"train.eval_tasks={tasks}", "train.eval_batch=3"])
    record = read_metrics(run.output / "metrics.jsonl")[-1]
    octavo.export(run.output, tmp_path / "out")
    lm = HFLM(pretrained=str(tmp_path / "out"), dtype="float32", device="cpu", batch_size=1)
    theirs = [
        evaluator.simple_evaluate(
            lm, tasks=asked, task_manager=TaskManager(include_path=str(tasks), include_defaults=False), bootstrap_iters=0,
            apply_chat_template=chat, fewshot_as_multiturn=chat,
        )
        for chat in (True, False)
    ]  # fmt: skip
    for figure in ("tiny_choice/acc", "tiny_likelihood/perplexity", "tiny_text/bits_per_byte", "tiny_answer/exact_match"):
        task, metric = figure.split("/")
        assert record[f"evaluation/{figure}"] == pytest.approx(theirs[0]["results"][task][f"{metric},none"], rel=1e-4), figure
    plain = theirs[1]["results"]["tiny_likelihood"]["perplexity,none"]
    assert record["evaluation/tiny_likelihood/perplexity"] != pytest.approx(plain, rel=1e-2)  # without the template


@needs_harness
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny_chioce", "unknown lm-eval task .* Did you mean 'tiny_choice'"),
        ("tiny_hub", "its metric 'acc' is code of the Hugging Face Hub"),
        ("tiny_script", "is code of the Hugging Face Hub"),
        ("tiny_sampled", "a task sets do_sample = True"),
    ],
)
def test_code_from_elsewhere_and_sampled_answers_are_refused(name, words, tiny_run, tmp_path):
    run = tiny_run(steps=1)
    with pytest.raises(InputError, match=words):
        train(run.file, [*EXACT, f"train.eval=lm-eval:{name}", f"train.eval_tasks={tasks_in(tmp_path)}"])
