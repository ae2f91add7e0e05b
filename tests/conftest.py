"""What tests of several folders share: a corpus and a run file so small that a whole training takes a second or two."""

import collections
import contextlib
import gc
import inspect
import os
import random
import sys
import zlib
from pathlib import Path

import pytest
import torch

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the Hub; read when huggingface_hub is imported
import torchvision_shim  # noqa: F401 - before anything imports transformers

gc.disable()  # until `pytest_collection_finish`: what imports and collection make stays

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before anything imports octavo.kernels
    # Tensors this small only wait for each other's threads: ten times slower where the cores are shared.
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of processes would import torch for a file or two
    # For devices that are not there `torch.manual_seed` only stores a stack trace each: 1 ms, thousands of times.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None
    with contextlib.suppress(ModuleNotFoundError):  # Triton is of Linux alone
        import quick_interpreter  # noqa: F401
import quick_runs  # noqa: E402, F401

SEED = int(os.environ.get("OCTAVO_TEST_SEED", "0"))
"""Of every draw of the tests: the same draws on each machine and in any order, and others for a number that is given."""
# What hypothesis tries is of the same kind: repeated, unless fresh draws are asked for.
with contextlib.suppress(ModuleNotFoundError):  # tests on a GPU need none
    import hypothesis

    hypothesis.settings.register_profile("octavo", derandomize=SEED == 0)
    hypothesis.settings.load_profile("octavo")


def pytest_report_header():
    return f"draws of OCTAVO_TEST_SEED={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the cases that `make test` omits: of `@long`, and those that `_superfluous` finds.

    `@long` marks all cases of a test; `@long(condition)` those whose parameters, by their names, satisfy the condition.
    """
    cases = collections.defaultdict(list)
    for item in items:
        for mark in [mark for mark in item.own_markers if mark.name == "long" and mark.args]:
            (condition,) = mark.args
            if not condition(*(item.callspec.params[name] for name in inspect.signature(condition).parameters)):
                item.own_markers.remove(mark)
                item.keywords._markers.pop("long", None)
        if hasattr(item, "callspec") and "long" not in item.keywords and "gpu" not in item.keywords:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one_test in cases.values():
        for item in _superfluous(of_one_test):
            item.add_marker("long")


def _superfluous(items):
    """All but one case of a test of several ranks, and else a few in which every row of every `parametrize` occurs.

    Always the same: by the names of the cases.
    """
    left = sorted(items, key=lambda item: zlib.crc32(item.name.encode()))
    fixtures = [each[-1].func for each in items[0]._fixtureinfo.name2fixturedefs.values()]
    if any(_starts_ranks(function) for function in (items[0].function, *fixtures)):
        return left[1:]
    values = {item: set(enumerate(item.callspec._idlist)) for item in items}
    missing = set().union(*values.values())
    while missing:
        chosen = max(left, key=lambda item: len(values[item] & missing))
        left.remove(chosen)
        missing -= values[chosen]
    return left


def _starts_ranks(function, seen=()):
    """Whether a function uses the module `ranks`, or calls one of its own module that does."""
    function = inspect.unwrap(function)
    if function in seen or not inspect.isfunction(function):
        return False
    codes, names = [function.__code__], set()
    for code in codes:
        names |= {*code.co_names}
        codes += filter(inspect.iscode, code.co_consts)
    used = [function.__globals__[name] for name in names if name in function.__globals__]
    return sys.modules.get("ranks") in used or any(
        _starts_ranks(each, (*seen, function))
        for each in used
        if inspect.isfunction(each) and each.__module__ == function.__module__
    )


@pytest.hookimpl(optionalhook=True)  # tests on a GPU need no pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Forgetful(LoadGroupScheduling):
        """Without the tests that have ended, which xdist counts anew with each test: 2 ms beside ten thousand."""

        def mark_test_complete(self, node, item_index, duration=0):
            nodeid = self.registered_collections[node][item_index]
            work, scope = self.assigned_work[node], self._split_scope(nodeid)
            del work[scope][nodeid]
            if not work[scope]:
                del work[scope]
            self._reschedule(node)

    return Forgetful(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seed PyTorch's generator and Python's by the test's name: what ran before it in its process changes no input."""
    seed = zlib.crc32(f"{SEED} {item.path.name} {item.name}".encode())
    torch.manual_seed(seed)
    random.seed(seed)


def pytest_collection_finish():
    """Leave what is imported by now out of garbage collections, of which a test session has thousands."""
    gc.collect()
    gc.freeze()
    gc.enable()


TEXT = (
    "a scale for each tensor keeps small values in reach of the format while large ones saturate and the history of "
    "maxima decides what the next step may hold before anything overflows"
)

RUN_FILE = """\
[model]
source = "llama-tiny"
[model.config]
vocab_size = 320
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
attention_dropout = 0.1

[data]
source = "{corpus}"
vocab_size = 300
sequence_length = 32
validation_fraction = 0.1
folder = "{data}"

[fp8]
amax_history_len = 4

[optimizer]
lr = 3e-3
warmup_steps = 2

[train]
output = "{output}"
steps = {steps}
global_batch = 4
micro_batch = 2
validate_batches = 2
sample_tokens = 0

[checkpoint]
every = {every}
"""


def write_corpus(path: Path, documents: int = 120, seed: int = 0) -> Path:
    """Documents of uneven length, one JSON object a line."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(TEXT.split(), k=draw.randint(3, 60))) for _ in range(documents)]
    path.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    return path


class TinyRun:
    """A run file in a folder of its own, sharing tokenised data with the others of its test session."""

    def __init__(self, folder: Path, corpus: Path, data: Path, steps: int, every: int) -> None:
        self.folder = folder
        self.corpus = corpus
        self.output = folder / "run"
        self.file = folder / "tiny.toml"
        self.file.write_text(RUN_FILE.format(corpus=corpus, data=data, output=self.output, steps=steps, every=every))


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory):
    """(corpus, folder of tokenised data) of the session."""
    folder = tmp_path_factory.mktemp("shared")
    return write_corpus(folder / "corpus.jsonl"), folder / "data"


@pytest.fixture(scope="session")
def tiny_run_in(shared_data):
    """A factory of tiny runs in given folders: `tiny_run_in(folder, steps=8, every=4)`; the data is made once."""

    def make(folder, *, steps=8, every=0, corpus=None):
        folder.mkdir(parents=True)
        return TinyRun(folder, corpus or shared_data[0], folder / "data" if corpus else shared_data[1], steps, every)

    return make


@pytest.fixture
def tiny_run(tmp_path, tiny_run_in):
    """The same in the test's own folder: `tiny_run("name", steps=8, every=4)`."""
    return lambda name="tiny", **settings: tiny_run_in(tmp_path / name, **settings)


_trials = {}


@pytest.fixture
def trials_once(monkeypatch):
    """The doctor's trials are processes that import torch: one that was run in the same environment is not repeated."""
    from octavo import libraries

    trial = libraries.trial

    def once(code, change):
        here = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        key = code, frozenset(change.items()), frozenset(here.items())
        if key not in _trials:
            _trials[key] = trial(code, change)
        return _trials[key]

    monkeypatch.setattr(libraries, "trial", once)


@pytest.fixture
def awkward():
    """A factory of matrices that casts must get right: `awkward(rows, columns, dtype)` with 32 powers of two, 0, ±inf, NaN."""

    def make(rows, columns, dtype):
        x = torch.randn(rows, columns) * torch.exp2(torch.randint(-20, 12, (rows, columns)).float())
        flat = x.view(-1)
        flat[:: max(1, len(flat) // 7)] = 0
        if len(flat) > 20:
            flat[3], flat[7], flat[11] = torch.inf, -torch.inf, torch.nan
        return x.to(dtype)

    return make
