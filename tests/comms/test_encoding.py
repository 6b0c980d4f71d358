"""What ranks tell each other arrives as it was, and nothing that another could have sent runs, hangs or brings a traceback."""

import ast
import dataclasses
import enum
import json
import math
import re
import struct
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.comms import encoding
from penstock.comms.encoding import JSON_LENGTH, decode, encode
from penstock.comms.transport import message_spec
from penstock.comms.transport.message_spec import TensorSpec
from penstock.schedule import Action, Event, Kind
from penstock.trees import flatten

Pair = namedtuple("Pair", ["left", "right"])


class Numbered(NamedTuple):
    """One with a method and a default."""

    number: int
    text: str = ""


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Registered:
    """Told to torch."""

    hidden: object
    rest: object = None


torch.export.register_dataclass(Registered)


@dataclasses.dataclass
class UnregisteredNode:
    """Not told to torch."""

    hidden: int


VALUES = [
    None, True, False, 0, -(2**70), 1.5, -0.0, math.inf, -math.inf, 5e-324, "", "ä\ud800\x00",
    b"", b"\x00\xff", (), [], {}, set(),
    (1, [2, {"a": (3,), 4: None, (5, "b"): True, None: 1.0, b"k": 2}]), {1, 2}, frozenset({"x"}), 1 + 2j, slice(1, None, 2),
    range(3), torch.float16, torch.device("cuda:1"), torch.device("cpu"), torch.Size([2, 3]), Path("a/b"),
    Pair(1, Pair("x", None)),
    Numbered(3), Colour.RED, Level.HIGH, Registered(1, [2]), OrderedDict(z=1, a=2), defaultdict(list, {1: [2]}),
    deque([1, 2], maxlen=3), Event(0, Action(Kind.F, 1, 2), 0.5, 0.75, None),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_arrives_as_it_was(value):
    arrived = decode(encode(value))
    assert type(arrived) is type(value)
    assert arrived == value
    assert repr(arrived) == repr(value)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(plain)
def test_any_plain_value_arrives_to_the_bit(value):
    assert repr(decode(encode(value))) == repr(value)


def test_the_bits_of_what_is_not_a_number_arrive():
    odd = struct.unpack("<d", bytes.fromhex("010000000000fcff"))[0]
    assert struct.pack("<d", decode(encode(odd))) == struct.pack("<d", odd)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4, dtype=torch.bfloat16).t(), torch.tensor(2.5), torch.empty(0, 3), torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64).conj(), torch.arange(9)[::2], torch.randn(2).to(torch.float8_e4m3fn),
        torch.nn.Parameter(torch.ones(2)),
    ],
)  # fmt: skip
def test_a_tensors_values_arrive(tensor):
    (arrived,) = decode(encode([tensor]))
    assert arrived.dtype == tensor.dtype
    assert not arrived.requires_grad
    assert encoding.tensor_bytes(arrived) == encoding.tensor_bytes(tensor.detach().resolve_conj().contiguous())


@pytest.mark.parametrize("name", ["BaseModelOutput", "CausalLMOutputWithPast"])
def test_outputs_of_transformers_travel_between_stages(name):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    kind = getattr(outputs, name)
    values = dict.fromkeys([field.name for field in dataclasses.fields(kind)][:2], torch.ones(2, 3))
    leaves, tree = flatten(kind(**values))
    spec = message_spec.message_spec_of(leaves, tree)
    arrived = message_spec.rebuild_message(
        message_spec.unpack_spec(message_spec.pack_spec(spec)), [torch.ones(2, 3) for _ in spec.parts], torch.device("cpu")
    )
    assert type(arrived) is kind
    assert list(arrived) == list(values)


def cannot_be_sent():
    inside = namedtuple("Inside", "x")
    return {
        "an open file": (sys.stdout, "an object of class .* cannot be sent to another rank: give tensors, numbers"),
        "a function": (len, "class builtin_function_or_method cannot"),
        "a class": (UnregisteredNode, "an object of class type cannot"),
        "an object": (
            UnregisteredNode(1),
            r"an object of class UnregisteredNode .*or call torch.export.register_dataclass\(UnregisteredNode\) on every rank",
        ),
        "a local class": (inside(1), "an object of class .*Inside .*or define .*Inside at the top level of a module"),
        "what is nested": (json.loads("[" * 200 + "]" * 200), "more than 100 containers inside each other"),
        "a long number": (10**5000, "a value cannot be sent to another rank: .*4300 digits"),
        "a sparse tensor": (torch.eye(2).to_sparse(), "an object of class Tensor cannot"),
    }  # fmt: skip


@pytest.mark.parametrize("what", cannot_be_sent())
def test_what_does_not_travel_is_told_by_name_before_anything_is_sent(what):
    value, sentence = cannot_be_sent()[what]
    with pytest.raises(ps.MismatchError, match=sentence):
        encode({"here": [value]})


def test_a_value_too_large_is_refused_at_both_ends(monkeypatch):
    monkeypatch.setattr(encoding, "MAX_VALUE_BYTES", 100)
    with pytest.raises(ps.MismatchError, match=r"a value of 1,0.. bytes cannot be sent to another rank: 100 are the most"):
        encode(b"x" * 1000)
    with pytest.raises(ps.MismatchError, match="another rank sends a value of 101 bytes: 100 are the most"):
        encoding.check_announced_size(101)


# ---- what another might send


def written(message, raw=b"") -> bytes:
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return JSON_LENGTH.pack(len(text)) + text + raw


HOSTILE = {
    "nothing": b"",
    "too short": b"\x01",
    "a length beyond it": JSON_LENGTH.pack(2**63) + b"[]",
    "no JSON": written(b"\x80\x04."),
    "a pickle": written(b"cos\nsystem\n(S'false'\ntR."),
    "deep": written(b"[" * 100_000),
    "deeper than allowed": written(b'["list",' * 200 + b"1" + b"]" * 200),
    "an object of JSON": written({"list": 1}),
    "more bytes than told": written(["list"], b"x"),
    "fewer bytes than told": written(["bytes", 5], b"x"),
    "bytes of a negative number": written(["bytes", -1], b"x"),
    "a tensor of any size": written(["Tensor", "torch.float32", 2**60]),
    "a tensor of negative sizes": written(["Tensor", "torch.float32", -1, -1], b"\0" * 4),
    "no type of torch": written(["dtype", "torch.nn"]),
    "an unknown kind": written(["eval", "1"]),
    "no kind": written([]),
    "a kind that is a list": written([["list"]]),
    "a function as a class": written(["NamedTuple", "os:system", "false"]),
    "a class that is none of those": written(["NamedTuple", "subprocess:Popen", "false"]),
    "a class as dataclass": written(["dataclass", "subprocess:Popen", ["list", "false"]]),
    "a dataclass of others": written(["dataclass", f"{__name__}:UnregisteredNode", 1]),
    "a registered class of others": written(["node", "subprocess:Popen", None, "false"]),
    "what is registered, but wrong": written(["node", f"{__name__}:Registered", ["list", 1], 2, 3]),
    "an attribute of a module in a module": written(["NamedTuple", "json:decoder.scanner.py_make_scanner", 1]),
    "a NamedTuple of other length": written(["NamedTuple", f"{__name__}:Pair", 1]),
    "an Enum without that member": written(["Enum", f"{__name__}:Colour", "_value2member_map_"]),
    "a factory": written(["type", "Popen"]),
    "a set of lists": written(["set", ["list"]]),
    "a dict without a value": written(["dict", 1]),
    "a long number": written(b"1" * 5000),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_no_rank_of_ours_sends_is_refused_in_a_sentence(data):
    with pytest.raises(ps.MismatchError, match=r"^what another rank sent cannot be read .*: all ranks must run the same"):
        decode(data)


def test_a_class_that_is_not_loaded_is_not_imported():
    assert "antigravity" not in sys.modules
    with pytest.raises(ps.MismatchError, match="it has the class antigravity:Fly, which this rank has not imported"):
        decode(written(["NamedTuple", "antigravity:Fly"]))
    assert "antigravity" not in sys.modules


SPEC = TensorSpec((2, 3), (3, 1), torch.float32, False, 24)


@pytest.mark.parametrize(
    "message",
    [
        None, 1, ("x",), (0, [SPEC], 1), (0, SPEC), (0, []), (1, [SPEC]), ([0, 1], [SPEC]), (0, [[]]), (0, [1]), (0, [(1, 2)]),
        (0, [SPEC._replace(bytes=25)]), (0, [SPEC._replace(shape=(2, -3))]), (0, [SPEC._replace(stride=(30, 1))]),
        (0, [SPEC._replace(stride=(1,))]), (0, [SPEC._replace(shape=3)]), (0, [SPEC._replace(dtype="float32")]),
        (0, [SPEC._replace(requires_grad=1)]), (0, [SPEC._replace(shape=(2**62, 2**62))]), (0, [SPEC._replace(shape=(2.0, 3))]),
    ],
    ids=repr,
)  # fmt: skip
def test_what_describes_no_message_is_refused(message):
    with pytest.raises(ps.MismatchError, match="describe no message"):
        message_spec.unpack_spec(encode(message))


MESSAGE = {"hidden": torch.ones(2, 3), "rest": (Pair(torch.zeros(1), "x"), [None, 2.5], Registered(torch.ones(1)))}


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=4), st.integers(0, 4)), min_size=1, max_size=4))
def test_a_mutated_message_is_read_or_refused(changes):
    for message in (MESSAGE, torch.ones(2, 3)):  # one tensor has a shorter description
        data = bytearray(message_spec.pack_spec(message_spec.message_spec_of(*flatten(message))))
        for place, new, gone in changes:
            place %= len(data) + 1
            data[place : place + gone] = new
        with suppress(ps.MismatchError):
            message_spec.unpack_spec(bytes(data))


def one_tensor(dims, *numbers, dtype=b"torch.float32"):
    return message_spec.ONE_TENSOR + bytes([dims, 1]) + struct.pack(f"<{len(numbers)}q", *numbers) + dtype


@pytest.mark.parametrize(
    "description",
    [message_spec.ONE_TENSOR, message_spec.ONE_TENSOR + b"\1", one_tensor(255), one_tensor(2, 2, 3, 3), one_tensor(1, 2, 30),
     one_tensor(1, 2, 1, 1), one_tensor(1, -2, 1), one_tensor(1, 2, -1), one_tensor(1, 2, 1, dtype=b"float"),
     one_tensor(1, 2, 1, dtype=b""), one_tensor(1, 2, 1, dtype=b"\xff")],
)  # fmt: skip
def test_what_describes_no_tensor_is_refused(description):
    with pytest.raises(ps.MismatchError, match="describe no message"):
        message_spec.unpack_spec(description)


# ---- nothing is unpickled


LAUNCHER = "penstock/launcher"  # unpickles what its own pipes to the ranks it started bring: docs/explanation/security.md
UNPICKLES = {f"{LAUNCHER}/rank_processes.py", f"{LAUNCHER}/rank_main.py", f"{LAUNCHER}/pickling.py"}
MODULES = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
WRITES = "penstock/checkpoint/files/dcp_files.py"  # writes the pickle of torch.distributed.checkpoint, and loads none
CALLS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list")
CALLS += ("recv_object_list", "Manager", "Queue")
WORDS = re.compile("|".join([*MODULES, *CALLS, r"torch\s*\.\s*load"]))  # without one of them a file need not be parsed


def unpickles(node: ast.AST) -> bool:
    match node:
        case ast.Import(names):
            return any(name.name.split(".")[0] in MODULES for name in names)
        case ast.ImportFrom(module):
            return (module or "").split(".")[0] in MODULES
        case ast.Call(
            ast.Attribute(ast.Name("torch"), "load"), keywords=keywords
        ):  # with weights_only: tensors and plain values
            return not any(keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True" for keyword in keywords)
        case ast.Call(ast.Attribute(_, name)):
            return name in CALLS
    return False


def test_nothing_is_unpickled_but_on_the_launchers_own_pipes():
    house = Path(ps.__file__).parent
    texts = {path.relative_to(house.parent).as_posix(): path.read_text("utf-8") for path in house.rglob("*.py")}
    trees = {path: ast.parse(text) for path, text in texts.items() if WORDS.search(text)}
    assert {path for path, tree in trees.items() if any(map(unpickles, ast.walk(tree)))} == UNPICKLES | {WRITES}
    assert set(re.findall(r"pickle\.(\w+)", texts[WRITES])) == {"dump"}


def test_a_compressed_value_is_read_from_the_begin_of_its_row_and_other_bytes_are_refused():
    value = {"rows": [3] * 200, "text": "x"}
    data = encoding.compress(encode(value), 64)
    assert 0 < len(data) <= 64
    assert encoding.decompress(data + bytes(1000)) == value
    assert encoding.compress(encode(list(range(1000))), 64) == b""  # does not fit
    for bad in (b"x", data[:-9], bytes(10), encoding.compress(b"\0" * 8, 64)):
        with pytest.raises(ps.MismatchError, match="cannot be read"):
            encoding.decompress(bad)


def rank_values():
    """Values of which none, one or all fit into a row."""
    control = ps.Pipeline(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)), None, microbatches=1)._control
    large = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rank = control.topology.rank
    return [
        control.all_gather_value(value, "to test")
        for value in ((rank, None), large if rank else "small", (large, rank), ("small", rank))
    ]


@pytest.mark.ranks
def test_values_of_all_sizes_arrive_on_all_ranks():
    for first, second, third, fourth in ps.launch(rank_values, 2):
        assert first == [(0, None), (1, None)]
        assert second[0] == "small"
        assert torch.equal(second[1], third[0][0])
        assert torch.equal(third[0][0], third[1][0])
        assert fourth == [("small", 0), ("small", 1)]
