"""Seeded changes of a checkpoint's manifest and tensor headers, with checksums put right or left alone."""

import copy
import hashlib
import json
import random

from octavo.checkpoint import manifest

ODD = (
    None,
    True,
    -1,
    0,
    1,
    2**40,
    2**64,
    1.5,
    "",
    "x",
    "../state.json",
    "/etc/hostname",
    "F4",
    "I32",
    "BF16",
    "0" * 64,
    [],
    [0],
    {},
)
"""Values of a wrong type, out of bounds, unknown, or right elsewhere."""


def change(files, seed):
    """`files` (bytes by name) with a change; the same for the same seed."""
    draw = random.Random(seed)
    files = dict(sorted(files.items()))
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    content = json.loads(files["manifest.json"])
    kind = draw.choice(["manifest", "manifest", "header", "header", "offsets", "file"])
    if kind == "manifest":
        changed = mutated(content, draw)
        content = changed if isinstance(changed, dict) else content
    elif kind == "file":
        move_files(files, content, draw)
    else:
        name = draw.choice(shards)
        files[name] = with_header(files[name], draw, kind)
        if draw.random() < 0.8:
            content["files"][name] = {"size": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
    if kind == "manifest" and draw.random() < 0.15:
        files["manifest.json"] = json.dumps(content).encode()
    else:
        files["manifest.json"] = signed(content)
    return files


def signed(content):
    """A manifest with its own sha256."""
    content = {key: value for key, value in content.items() if key != "sha256"}
    return json.dumps({**content, "sha256": manifest._digest(content)}).encode()


def move_files(files, content, draw):
    """A file left out of the manifest, absent, under another name, or of another's content."""
    name, other = draw.sample([name for name in files if name != "manifest.json"], 2)
    kind = draw.choice(["left out", "absent", "neither", "renamed", "exchanged", "outside"])
    if kind in ("left out", "neither"):
        del content["files"][name]
    if kind in ("absent", "neither"):
        del files[name]
    if kind == "renamed":
        files["a" + name] = files.pop(name)
        content["files"]["a" + name] = content["files"].pop(name)
    if kind == "exchanged":
        files[name], files[other] = files[other], files[name]
        entries = content["files"]
        entries[name], entries[other] = entries[other], entries[name]
    if kind == "outside":
        content["files"][f"../{draw.choice(['c', 'd'])}/{name}"] = content["files"].pop(name)


def with_header(file, draw, kind):
    """A tensor file with another header."""
    length = int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8 : 8 + length]), file[8 + length :]
    if kind == "offsets":
        saved = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(mutated(saved, draw))
    else:
        header = mutated(header, draw)
    text = json.dumps(header)
    if draw.random() < 0.1 and isinstance(header, dict) and header:  # a tensor twice
        name = draw.choice(sorted(header))
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    text = text.encode()
    claimed = len(text) if draw.random() < 0.95 else draw.choice([0, len(text) - 1, len(text) + 1, 2**62])
    return claimed.to_bytes(8, "little") + text + data


def mutated(content, draw):
    """A JSON value with one change at a place of any depth."""
    content = copy.deepcopy(content)
    holder = content
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return content
        key = draw.choice(keys)
        if not isinstance(holder[key], dict | list) or draw.random() < 0.2:
            break
        holder = holder[key]
    value = holder[key]
    kinds = ["odd", "odd", "remove", "copy", "exchange"] + (["add"] * 5 if type(value) is int else [])
    kind = draw.choice(kinds)
    if kind == "add":
        holder[key] = value + draw.choice([-1, 1, 2, 4, 8, -(2**40)])
    elif kind == "remove":
        del holder[key]
    elif kind == "exchange":
        other = draw.choice(keys)
        holder[key], holder[other] = holder[other], value
    elif kind == "copy" and isinstance(holder, dict):
        holder[draw.choice([f"{key}2", "../" + key, ""])] = value
    elif kind == "copy":
        holder.append(value)
    else:
        holder[key] = copy.deepcopy(draw.choice(ODD))
    return content
