"""Scripts that change a value in ways that are hard to see, run with an estimator that keeps its arguments: what
`octavo migrate` reads is the same or unknown, never another value.
"""

import contextlib
import io
import json
import random
import signal
import sys
import types

import pytest

from octavo.compat.migrate.known import REST, UNKNOWN
from octavo.compat.migrate.run_file import run_file
from octavo.compat.migrate.script import read
from octavo.errors import InputError

HEAD = (
    "from sagemaker.pytorch import PyTorch\nimport copy, os, json\nhp = {'lr': 0.1, 'steps': 15, 'seed': 7, 'inner': {'a': 1}}"
    "\ndeg = {'d': 2}\nn = 1\n"
)
END = "\ne = PyTorch(entry_point='t.py', hyperparameters=hp, distribution=deg, instance_count=n)\ne.fit()\n"


@pytest.fixture(autouse=True)
def handler_of_this_process():
    """One of the scripts installs a handler, which would stay for what runs later in this process."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def made(code):
    """The arguments of the last estimator that a script starts, as they are then."""
    found = []

    class PyTorch:
        def __init__(self, *args, **keywords):
            self.keywords = keywords

        def fit(self, *args, **keywords):
            found.append(json.loads(json.dumps(self.keywords)))

    names = {"sagemaker": types.ModuleType("sagemaker"), "sagemaker.pytorch": types.ModuleType("sagemaker.pytorch")}
    names["sagemaker.pytorch"].PyTorch = PyTorch
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, "script", "exec"), {"__name__": "__main__"})
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return found[-1]


def others(read_value, value, place=""):
    """Places at which what is read is neither the value nor unknown."""
    if read_value is UNKNOWN:
        return
    if not isinstance(value, dict) or not isinstance(read_value, dict):
        if type(value) is not type(read_value) or value != read_value:
            yield place, read_value, value
        return
    for key in {**value, **read_value}:
        if key == REST:
            continue
        if key not in read_value:
            if REST not in read_value:
                yield f"{place}/{key}", "nothing", value[key]
        elif key not in value:
            if read_value[key] is not UNKNOWN:
                yield f"{place}/{key}", read_value[key], "nothing"
        else:
            yield from others(read_value[key], value[key], f"{place}/{key}")


def is_whole(value):
    return value is not UNKNOWN and (not isinstance(value, dict) or (REST not in value and all(map(is_whole, value.values()))))


def looked_up(tmp_path, code):
    (tmp_path / "s.py").write_text(code)
    found = read(tmp_path / "s.py").estimators[-1]
    return {name: value for name, value in found.items() if name != "fit"}


HIDDEN = {
    "suppress": "import contextlib\nwith contextlib.suppress(KeyError):\n    hp['lr'] = 0.2\n    hp['no']\n    hp['lr'] = 0.3",
    "try": "try:\n    hp['lr'] = 0.2\n    hp['no']\n    hp['lr'] = 0.1\nexcept KeyError:\n    pass",
    "finally": "def f():\n    try:\n        hp['lr'] = 0.2\n        hp['no']\n    finally:\n        return 3\n"
    "hp['steps'] = f()",
    "group": "try:\n    hp['lr'] = 0.3\n    raise ExceptionGroup('x', [ValueError()])\nexcept* ValueError:\n    hp['seed'] = 3",
    "exit": "import sys\ntry:\n    hp['lr'] = 0.3\n    sys.exit()\nexcept SystemExit:\n    pass",
    "own exit": "def exit(): pass\nimport time\nif time.time() > 0:\n    hp['lr'] = 0.3\n    exit()",
    "bound method": "u = hp.update\nu(lr=0.3)",
    "getattr": "getattr(hp, 'update')(lr=0.3)",
    "setitem": "hp.__setitem__('lr', 0.3)",
    "of the class": "dict.update(hp, lr=0.3)",
    "of its type": "type(hp).update(hp, lr=0.3)",
    "operator": "import operator\noperator.setitem(hp, 'lr', 0.3)",
    "methodcaller": "import operator\noperator.methodcaller('update', lr=0.3)(hp)",
    "partial": "import functools\nf = functools.partial(hp.update, lr=0.3)\nf()",
    "reduce": "import functools\nfunctools.reduce(lambda a, b: a.update(lr=b) or a, [0.3], hp)",
    "assert": "assert hp.update({'lr': 0.3}) is None",
    "condition": "if hp.update({'lr': 0.3}) is None:\n    pass",
    "f-string": "s = f\"{hp.update({'lr': 0.3})}\"",
    "annotation": "x: hp.update(lr=0.3) = 1",
    "annotation of an argument": "def f(a: hp.update(lr=0.3)): pass",
    "comparisons": "import time\ntime.time() < 0 < hp.update(lr=0.9)",
    "unknown or": "import time\n(time.time() < 0) or hp.update(lr=0.3)",
    "list": "[hp.update({'lr': v}) for v in (0.2, 0.3)]",
    "set": "{hp.update(lr=0.3) for _ in (1,)}",
    "lists": "[[d.update(lr=0.3) for d in (hp,)] for _ in (1, 2)]",
    "condition of a list": "[0 for k in list(hp) if k == 'lr' and hp.update(lr=0.3)]",
    "map": "list(map(hp.update, [{'lr': 0.3}]))",
    "map that is not read": "m = map(hp.update, [{'lr': 0.3}])\nhp['lr'] = 0.2\nlist(m)",
    "sorted": "sorted([1, 2], key=lambda x: hp.update(lr=0.3) or x)",
    "lambda": "f = lambda: hp.update(lr=0.3)\nf()",
    "default of a lambda": "f = lambda d=hp: d.update(lr=0.3)\nf()",
    "class body": "class A:\n    hp['lr'] = 0.3",
    "loop of a class body": "class A:\n    for k in ('lr',):\n        hp[k] = 0.3",
    "global of a class": "class A:\n    global hp\n    hp = dict(hp, lr=0.3)",
    "name of a class or around it": "class A:\n"
    "    try:\n        hp['no']\n        hp = {}\n    except KeyError:\n        hp['lr'] = 0.3",
    "attribute of a class": "class A:\n    h = hp\nA.h['lr'] = 0.3",
    "enter": "class A:\n    def __enter__(self):\n        hp['lr'] = 0.3\n    def __exit__(self, *a): pass\n"
    "with A():\n    pass",
    "exit that suppresses": "class A:\n    def __enter__(self): pass\n    def __exit__(self, *a): return True\nwith A():\n"
    "    hp['lr'] = 0.3\n    raise ValueError",
    "contextmanager": "import contextlib\n@contextlib.contextmanager\ndef c():\n    hp['lr'] = 0.3\n    yield hp\n"
    "with c() as h:\n"
    "    h['steps'] = 4",
    "with as": "import contextlib\nwith contextlib.nullcontext(0.3) as hp['lr']:\n    pass",
    "stack": "import contextlib\nwith contextlib.ExitStack() as s:\n    s.callback(hp.update, lr=0.3)",
    "property": "class C:\n    @property\n    def v(self):\n        hp['lr'] = 0.3\nC().v",
    "setter": "class C:\n    @property\n    def v(self): return 1\n    @v.setter\n"
    "    def v(self, x): hp['lr'] = x\nC().v = 0.3",
    "getattr of a class": "class C:\n    def __getattr__(self, n):\n        hp['lr'] = 0.3\nC().any",
    "operators": "class C:\n    def __add__(self, o):\n        o['lr'] = 0.3\nC() + hp",
    "comparison": "class C:\n    def __eq__(self, o):\n        o['lr'] = 0.3\n        return True\nhp == C()",
    "format": "class C:\n    def __format__(self, s):\n        hp['lr'] = 0.3\n        return ''\nf'{C()}'",
    "del": "class C:\n    def __del__(self):\n        hp['lr'] = 0.3\nc = C()\ndel c",
    "iterator": "class C:\n    def __iter__(self):\n        hp['lr'] = 0.3\n        return iter([])\nlist(C())",
    "subclass": "class B:\n    def __init_subclass__(cls):\n        hp['lr'] = 0.3\nclass D(B):\n    pass",
    "instance": "class C:\n    def __init__(self, d): self.d = d\n    def go(self): self.d['lr'] = 0.3\nc = C(hp)\n"
    "hp['lr'] = 0.2\nc.go()",
    "decorator": "def reg(f):\n    f()\n    return f\n@reg\ndef go():\n    hp['lr'] = 0.3",
    "argument of a decorator": "def d(h):\n    h['lr'] = 0.3\n    return lambda f: f\n@d(hp)\ndef f(): pass",
    "default": "x = 5\ndef f(v=x):\n    return v\nx = 6\nhp['steps'] = f()",
    "shared default": "def f(v, acc=[]):\n    acc.append(v)\n    return acc[0]\nf(5)\nhp['steps'] = f(9)",
    "shared dictionary": "def f(d={'n': 0}):\n    d['n'] += 1\n    return d\nf()\nf()['n'] = 40\nhp['steps'] = f()['n']",
    "defaults": "def f(v=1):\n    return v\nf.__defaults__ = (30,)\nhp['steps'] = f()",
    "code": "def f():\n    return 1\ndef g():\n    return 30\nf.__code__ = g.__code__\nhp['steps'] = f()",
    "nonlocal": "def mk():\n    s = 3\n    def bump():\n        nonlocal s\n        s = 30\n    bump()\n"
    "    hp['steps'] = s\nmk()",
    "inner function": "def mk():\n    h = {'lr': 1}\n    def g():\n        h['lr'] = 0.3\n    g()\n    hp.update(h)\nmk()",
    "inner function later": "def o():\n    h = hp\n    def g(v):\n        h['lr'] = v\n    return g\nk = o()\nhp['lr'] = 0.2\n"
    "k(0.3)",
    "global of an inner function": "def a():\n    def b():\n        global hp\n        hp = dict(hp, lr=0.3)\n    b()\na()",
    "generator that is not run": "def g():\n    hp['lr'] = 0.9\n    yield 1\ng()",
    "generator that is run later": "def g():\n    hp['lr'] = 0.3\n    yield 1\nq = g()\nhp['lr'] = 0.2\nlist(q)",
    "coroutine that is not run": "async def g():\n    hp['lr'] = 0.9\nc = g()\nc.close()",
    "coroutine": "import asyncio\nasync def f(d):\n    d['lr'] = 0.3\nasyncio.run(f(hp))",
    "thread": "import threading\nt = threading.Thread(target=lambda: hp.update(lr=0.3))\nt.start(); t.join()",
    "thread of a function": "import threading\ndef f():\n    hp['lr'] = 0.3\nt = threading.Thread(target=f)\n"
    "hp['lr'] = 0.2\nt.start()\n"
    "t.join()",
    "pool": "from concurrent.futures import ThreadPoolExecutor as T\nwith T(1) as p:\n    p.submit(hp.update, lr=0.3)",
    "signal": "import signal\nsignal.signal(signal.SIGUSR1, lambda *a: hp.update(lr=0.3))\nsignal.raise_signal(signal.SIGUSR1)",
    "own copy": "class copy:\n    @staticmethod\n    def deepcopy(x): return x\nb = copy.deepcopy(hp)\nb['lr'] = 0.3",
    "own print": "def print(d):\n    d['lr'] = 0.3\nprint(hp)",
    "own dict": "def g():\n    global dict\n    dict = lambda *a, **k: {**hp, 'lr': 0.3}\ng()\nhp = dict()",
    "replaced join": "keep = os.path.join\nos.path.join = lambda *a: '/x'\nhp['at'] = os.path.join('/a', 'b')\n"
    "os.path.join = keep",
    "exec": "exec(\"hp['lr'] = 0.3\")",
    "exec of a function": "exec('def f(d): d[\"lr\"] = 0.3')\nf(hp)",
    "globals later": "g = globals()\nhp = dict(hp)\ng['hp'] = dict(hp, lr=0.3)",
    "globals of a function": "def f(): pass\nf.__globals__['hp']['lr'] = 0.3",
    "locals": "locals()['hp']['lr'] = 0.3",
    "vars": "import types\ns = types.SimpleNamespace(hp=hp)\nvars(s)['hp']['lr'] = 0.3",
    "namespace": "import argparse\na = argparse.Namespace(h=hp)\nsetattr(a, 'lr', 0.3)\na.h['lr'] = a.lr",
    "replace": "import dataclasses\n@dataclasses.dataclass\nclass C:\n    h: dict\nd = dataclasses.replace(C(hp))\n"
    "d.h['lr'] = 0.3",
    "chain": "import collections\nc = collections.ChainMap(hp)\nc['lr'] = 0.3",
    "queue": "import collections\nq = collections.deque()\nq.append(hp)\nq[0]['lr'] = 0.3",
    "match": "match [hp]:\n    case [d]:\n        d['lr'] = 0.3",
    "guard": "match 1:\n    case 1 if hp.update(lr=0.3) is None:\n        pass",
    "walrus": "if (k := hp.pop('lr')) and (hp := {**hp, 'lr': k * 2}):\n    pass",
    "walrus of a global": "def f():\n    global hp\n    (hp := dict(hp))['lr'] = 0.3\n"
    "    [hp := {**hp, 'seed': 1} for _ in (1,)]\nf()",
    "walrus in a list": "[y := i for i in (4, 9)]\nhp['steps'] = y",
    "unpacked": "a, *rest, b = [1, hp, 2]\nrest[0]['lr'] = 0.3",
    "index of the same statement": "i = 0\nl = [1, 2]\ni, l[i] = 1, 9\nhp['steps'] = l[1]",
    "slice": "l = [1, 2, 3]\nl[0:1] = [7, 8]\nhp['steps'] = l[1]",
    "deleted slice": "l = [1, 2, 3]\ndel l[:1]\nhp['steps'] = l[0]",
    "tuple and +=": "a = (1,)\nb = a\nb += (2,)\nhp['steps'] = len(a)",
    "target of +=": "c = []\ndef k():\n    c.append(1)\n    return 'steps'\nhp[k()] += 1\nhp['seed'] = len(c)",
    "attribute and |=": "class C: pass\nc = C()\nc.h = hp\nc.h |= {'lr': 0.3}",
    "view": "ks = hp.keys()\nhp['zz'] = 1\nhp['steps'] = len(ks)",
    "iterator read twice": "z = zip(['a'], [1])\nlist(z)\nhp['steps'] = 10 + len(list(z))",
    "list that grows": "l = [1, 2]\nfor i, x in enumerate(l):\n    if i == 0:\n        l.append(9)\nhp['steps'] = i",
    "while and else": "i = 0\nwhile i < 3:\n    i += 1\nelse:\n    hp['steps'] = i",
    "for, break and else": "for i in range(5):\n    if i == 3:\n        break\nelse:\n    hp['lr'] = 0.9\nhp['steps'] = i",
    "loop over a place": "for hp['steps'] in (3, 4):\n    pass",
    "unknown return": "import time\ndef f():\n    if time.time() > 0:\n        return\n    hp['lr'] = 0.9\nf()",
    "unknown break": "import time\nfor v in (0.2, 0.3):\n    hp['lr'] = v\n    if time.time() > 0:\n        break",
    "unknown continue": "import time\nfor v in (0.2, 0.3):\n    if time.time() > 0:\n        continue\n    hp['lr'] = v",
    "unknown name": "import time\nd = hp if time.time() > 0 else {}\nd['lr'] = 0.3",
    "unknown entry": "import time\nt = {'a': hp, 'b': deg}\nt['a' if time.time() > 0 else 'b']['lr'] = 0.3",
    "unknown result": "import time\ndef f():\n    if time.time() > 0:\n        return hp\n    return deg\nf()['lr'] = 0.3",
    "name of the last round": "import time\nc, k = {}, 0\nwhile time.time() > 0:\n    c['lr'] = 0.3\n    c = hp\n"
    "    k += 1\n    if k > 2:\n"
    "        break",
    "equal tuple": "hp['steps'] = 5 if (1,) == [1] else 6",
    "identity": "a, b = [1], [1]\nhp['steps'] = 5 if a is b else 6",
    "keys of one value": "t = {1: 5, True: 6}\nt[1.0] = 7\nhp['steps'] = t[1]",
    "key of stars": "t = {'**': 4, 'a': 2}\nhp['steps'] = t['a']",
    "list of itself": "t = {}\nt['t'] = t\nt['t']['t']['x'] = 12\nhp['steps'] = t['x']",
    "sum": "l = sum([[hp]], [])\nl[0]['lr'] = 0.3",
    "product": "l = [hp] * 2\nl[1]['lr'] = 0.3",
    "largest": "d = max([hp], key=len)\nd['lr'] = 0.3",
    "never called": "def old():\n    PyTorch(entry_point='t.py', hyperparameters={'lr': 9, 'inner': 1}).fit()",
    "estimator of an inner function": "def f():\n    def g():\n"
    "        PyTorch(entry_point='t.py', hyperparameters={'lr': 9}).fit()\n"
    "    g()\nf()",
    "estimator of a method": "class C:\n    def f(self):\n"
    "        PyTorch(entry_point='t.py', hyperparameters={'lr': 9}).fit()\n"
    "c = C()",
    "estimators in a loop": "for v in (0.1, 0.3):\n    hp['lr'] = v\n"
    "    PyTorch(entry_point='t.py', hyperparameters=hp).fit()\n"
    "hp['lr'] = 5",
    "deep copy of what is shared": "x = {'a': deg}\nx['b'] = x['a']\ny = copy.deepcopy(x)\ny['a']['d'] = 4\ndeg = y['b']",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", HIDDEN.values(), ids=HIDDEN)
def test_a_change_that_is_not_followed_leaves_no_value_of_before(tmp_path, text):
    code = f"{HEAD}{text}{END}"
    assert list(others(looked_up(tmp_path, code), made(code))) == []


FOLLOWED = {
    "function": "def f(d, v=0.3):\n    d['lr'] = v\n    return d\nf(hp)",
    "shared default": HIDDEN["shared default"],
    "function by another name": "def f(d):\n    d['lr'] = 0.3\ng = {'a': f}\ng['a'](hp)",
    "dictionary of a dictionary": "hp = {k: (v * 2 if k == 'steps' else v) for k, v in hp.items()}",
    "tuples": "hp['lr'], hp['steps'] = 0.4, 8\na, *b = [1, 2, 3]\nhp['seed'] = b[-1]",
    "while": "i = 1\nwhile i < 5:\n    i += 1\nhp['steps'] = i",
    "break": "for v in [0.1, 0.2, 0.3]:\n    hp['lr'] = v\n    if v > 0.15:\n        break",
    "live list": "l = [1, 2]\nfor x in l:\n    if x == 1:\n        l.append(50)\nhp['steps'] = x",
    "readers": "print(hp, len(hp))\nprint(json.dumps(hp), f'{hp}')\nfor k in hp:\n    print(k)",
    "class that reads": "hp.pop('inner')\nclass C:\n    def f(self):\n        return hp['lr'], 'seed' in hp\nprint(C())\n"
    "hp['lr'] = 0.3",
    "logger": "import logging\nlog = logging.getLogger('a')\nlog.info('%s', hp)\nhp['lr'] = 0.3",
    "context": "import contextlib\nwith contextlib.nullcontext():\n    hp['lr'] = 0.3",
    "two names": "a = b = hp\nb['lr'] = 0.2\na |= {'steps': 3}",
}


@pytest.mark.parametrize("text", FOLLOWED.values(), ids=FOLLOWED)
def test_plain_ways_are_followed_to_the_value(tmp_path, text):
    code = f"{HEAD}{text}{END}"
    found = looked_up(tmp_path, code)
    assert is_whole(found["hyperparameters"])
    assert found["hyperparameters"] == made(code)["hyperparameters"]


def test_a_value_that_a_bound_method_changes_is_refused_by_name(tmp_path):
    (tmp_path / "s.py").write_text(
        "from sagemaker.pytorch import PyTorch\nimport time\nhp = {'max_context_width': 64, 'lr': 0.1}\n"
        "if time.time() > 0:\n    hp['lr'] = 0.2\nPyTorch('t.py', hyperparameters=hp, instance_type='ml.p5.48xlarge').fit()\n"
    )
    with pytest.raises(InputError, match="lr"):
        run_file([read(tmp_path / "s.py")])


NAMES = ("hp", "deg", "a", "b", "c")
VALUES = (
    "{DICT}", "dict({DICT})", "{DICT} | {{'{KEY}': {NUMBER}}}", "copy.copy({DICT})", "{{**{DICT}, '{KEY}': {NUMBER}}}",
    "{DICT}.get('{KEY}', {DICT})", "{DICT}.setdefault('{KEY}', {DICT})", "{{'{KEY}': {NUMBER}, 'inner': {DICT}}}",
    "({DICT} if {TEST} else {DICT})", "({DICT}, {DICT})[{BIT}]", "[{DICT}, {DICT}][{BIT}]", "give({DICT})",
    "{{k: v for k, v in {DICT}.items()}}", "({DICT} or {DICT})", "copy.deepcopy({DICT})", "next(iter([{DICT}]))",
)  # fmt: skip
TESTS = ("True", "ask()", "n > 0", "'{KEY}' in {DICT}", "len({DICT}) > 2", "not {DICT}", "{DICT} is {DICT}", "ask() and {DICT}")
PLAIN = (
    "{DICT}['{KEY}'] = {NUMBER}", "{DICT}.update({KEY}={NUMBER})", "{NAME} = {VALUE}", "{NAME} = {VALUE}", "{DICT} |= {DICT}",
    "{DICT}.pop('{KEY}', None)", "{DICT}['inner'] = {VALUE}", "put({DICT}, {NUMBER})", "keep({DICT})",
    "u = {DICT}.update\nu(x=5)",
    "box.append({DICT})", "box[0]['{KEY}'] = {NUMBER}", "again()", "late.append(lambda: {DICT}.update({KEY}={NUMBER}))",
    "late and late[0]()", "{NAME}, {NAME} = {DICT}, {DICT}", "assert put({DICT}, {NUMBER}) is None", "holder.d = {DICT}",
    "holder.d['{KEY}'] = {NUMBER}", "n += 1", "{DICT}['n'] = n", "del {DICT}['{KEY}']",
    "[put(d, {NUMBER}) for d in ({DICT}, {DICT})]",
)  # fmt: skip
AROUND = (
    "if {TEST}:\n{BODY}\nelse:\n{BODY}", "for k in ('p', 'q'):\n{BODY}", "for k in some():\n{BODY}\n    if ask(): break",
    "try:\n{BODY}\n    {DICT}['none']\n{BODY}\nexcept KeyError:\n{BODY}", "with quiet():\n{BODY}\n    {DICT}['none']\n{BODY}",
    "def f():\n    global hp\n{BODY}\n    if {TEST}: return\n{BODY}\nf()", "while ask():\n{BODY}",
    "for each in ({DICT}, {DICT}):\n    each['{KEY}'] = {NUMBER}\n    if {TEST}: continue\n{BODY}", "class C:\n{BODY}",
    "try:\n{BODY}\nfinally:\n{BODY}", "match n:\n    case {NUMBER} | 1:\n        pass\n    case _:\n"
    "        {DICT}['{KEY}'] = 3",
)  # fmt: skip
START = (
    "import random, contextlib\nquiet = lambda: contextlib.suppress(Exception)\nbox, late = [{'x': 1}], []\n"
    "a, b, c = {'x': 1}, hp, deg\n"
    "class Holder: d = {}\nholder = Holder()\ndef ask():\n    return random.random() < 0.5\ndef some():\n"
    "    return random.choice([[], [1], [1, 2]])\n"
    "def give(d):\n    return d\ndef put(d, v):\n    d['x'] = v\ndef keep(d):\n    box.append(d)\ndef again():\n"
    "    for d in box:\n        d['x'] = 77\n"
)


def _drawn(rng, text, depth):
    """A text with each of its places filled at random."""
    while "{" in text:
        start = max(text.rfind(f"{{{kind}}}") for kind in ("DICT", "KEY", "NUMBER", "NAME", "TEST", "VALUE", "BIT", "BODY"))
        if start < 0:
            return text.replace("{{", "{").replace("}}", "}")
        kind = text[start + 1 : text.index("}", start)]
        if kind == "BODY":
            lines = [line for _ in range(rng.randint(1, 2)) for line in _statement(rng, depth + 1).splitlines()]
            part = "\n".join(f"    {line}" for line in lines)
        else:
            choices = {
                "DICT": NAMES, "NAME": NAMES, "KEY": ("lr", "steps", "x", "inner"), "TEST": TESTS, "VALUE": VALUES,
                "BIT": ("0", "1"),
                "NUMBER": tuple(map(str, range(9))),
            }  # fmt: skip
            part = _drawn(rng, rng.choice(choices[kind]), depth)
        text = text[:start] + part.replace("{", "{{").replace("}", "}}") + text[start + len(kind) + 2 :]
    return text.replace("{{", "{").replace("}}", "}")


def _statement(rng, depth=0):
    return _drawn(rng, rng.choice(AROUND if depth < 2 and rng.random() < 0.35 else PLAIN), depth)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_no_value_of_a_generated_script_is_another_than_its_run_has(tmp_path):
    whole = runs = 0
    while runs < 300:
        rng = random.Random(random.getrandbits(64))
        code = HEAD + START + "\n".join(_statement(rng) for _ in range(rng.randint(1, 6))) + END
        try:
            value = made(code)
        except (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError):  # it ends before its estimator
            continue
        runs += 1
        found = looked_up(tmp_path, code)
        whole += is_whole(found["hyperparameters"])
        assert list(others(found, value)) == [], code
    assert 10 < whole < 290
