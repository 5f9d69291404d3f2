"""The GGUF loader: what it reads, one refusal for each kind of fault, and thousands of damaged headers."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import ARRAY, BOOL, STRING, U32, Bytes, array, entry, tensor, text
from quadjet.engine.budget import memory_budget
from quadjet.engine.errors import EngineError, ModelFileError
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.lowering import lower
from quadjet.engine.model import load_config
from quadjet.engine.reference import ReferenceBackend
from reference_runs import run
from tiny_models import FAMILIES
from tools.synth_gguf import SHAPES, Shape, write

GOOD = Bytes()
HUGE = 2**64 - 1


def add(key: str | bytes, kind: int, value: bytes) -> Bytes:
    return GOOD.but(entries=(*GOOD.entries, entry(key, kind, value)))


def one_tensor(*tensors: bytes) -> Bytes:
    return GOOD.but(tensors=tensors)


FAULTS: dict[str, tuple[Bytes | bytes, str]] = {
    "magic": (GOOD.but(magic=b"GGML"), "not a GGUF file"),
    "version": (GOOD.but(version=1), "version 1; versions 2 and 3"),
    "big endian": (GOOD.but(version=3 << 24), "big-endian"),
    "only the magic": (b"GGUF", "the version needs 4 bytes at 4, but the file ends at 4"),
    "tensor count": (GOOD.but(num_tensors=HUGE), "number of tensors is 18446744073709551615, more than"),
    "metadata count": (GOOD.but(num_entries=HUGE), "number of metadata keys is 18446744073709551615, more than"),
    "one tensor too few in the file": (GOOD.but(num_tensors=3), "a tensor name|dimensions|number of tensors"),
    "key length": (GOOD.but(entries=(struct.pack("<Q", 2**40) + bytes(64),)), "over the limit"),
    "key over the file": (GOOD.but(entries=(struct.pack("<Q", 60_000) + bytes(64),)), "needs 60000 bytes"),
    "key not UTF-8": (add(b"\xff\xfe", U32, bytes(4)), "a metadata key is not UTF-8"),
    "key twice": (add("n", U32, bytes(4)), "'n' appears twice"),
    "value type": (add("x", 13, bytes(8)), "'x' has the unknown value type 13"),
    "string length": (add("x", STRING, struct.pack("<Q", HUGE)), "'x' needs 18446744073709551615 bytes"),
    "string not UTF-8": (add("x", STRING, text(b"\xc3\x28")), "'x' is not UTF-8"),
    "boolean": (add("x", BOOL, b"\x02"), "neither 0 nor 1"),
    "array length": (add("x", ARRAY, array(U32, HUGE, b"")), "array 'x' is 18446744073709551615"),
    "array of strings length": (add("x", ARRAY, array(STRING, 2**40, b"")), "array 'x' is 1099511627776"),
    "array element length": (add("x", ARRAY, array(STRING, 2, text("a") + struct.pack("<Q", HUGE))), "element 1 of 'x' claims"),
    "array element not UTF-8": (add("x", ARRAY, array(STRING, 1, text(b"\x80"))), "element 0 of 'x' is not UTF-8"),
    "array type": (add("x", ARRAY, array(77, 1, bytes(8))), "unknown value type 77"),
    "array of arrays": (add("x", ARRAY, array(ARRAY, 1, array(U32, 0, b""))), "array of arrays"),
    "alignment 0": (add("general.alignment", U32, struct.pack("<I", 0)), "general.alignment is 0"),
    "alignment 24": (add("general.alignment", U32, struct.pack("<I", 24)), "general.alignment is 24"),
    "alignment too large": (add("general.alignment", U32, struct.pack("<I", 1 << 31)), "general.alignment is 2147483648"),
    "alignment a string": (add("general.alignment", STRING, text("32")), "general.alignment is '32'"),
    "name length": (one_tensor(tensor("a" * 65)), "tensor name is 65 bytes long"),
    "name twice": (one_tensor(tensor("a"), tensor("a", offset=32)), "tensor 'a' appears twice"),
    "no dimensions": (one_tensor(tensor("a", ())), "0 dimensions"),
    "five dimensions": (one_tensor(tensor("a", (1,) * 5)), "5 dimensions"),
    "billions of dimensions": (one_tensor(text("a") + struct.pack("<I", 2**32 - 1) + bytes(64)), "4294967295 dimensions"),
    "dimension 0": (one_tensor(tensor("a", (8, 0))), "dimension of 0"),
    "dimensions overflow": (one_tensor(tensor("a", (2**63, 2**63, 4))), "but the file ends at"),
    "tensor type": (one_tensor(tensor("a", kind=99)), "unknown type 99"),
    "part of a block": (one_tensor(tensor("a", (48,), kind=2)), "rows of 48 values, not a multiple of the 32"),
    "offset unaligned": (one_tensor(tensor("a", offset=4)), "offset 4, not a multiple of the alignment 32"),
    "offset over the end": (one_tensor(tensor("a", offset=2**63)), "but the file ends at"),
    "one byte short": (GOOD.but(data=bytes(63)), "tensor 'b' needs 32 bytes"),
    "overlap": (one_tensor(tensor("a", (16,)), tensor("b", offset=32)), "'a' and 'b' overlap"),
}


def test_it_reads_metadata_and_tensors(tmp_path: Path) -> None:
    data = np.arange(16, dtype=np.float32)
    made = add("words", ARRAY, array(STRING, 2, text("ä") + text(""))).but(data=data.tobytes())
    with GgufFile.open(made.write(tmp_path)) as file:
        assert file.metadata == {"general.name": "a", "n": 7, "words": ["ä", ""]}
        assert file.tensors["b"].shape == (2, 4)
        assert file.raw("b").view(np.float32).tolist() == data[8:].tolist()


def test_it_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {"u": 2**63, "i": -5, "f": 0.1, "yes": True, "text": "a\nb"}
    writer.add_uint64("u", 2**63)
    writer.add_int64("i", -5)
    writer.add_float64("f", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "a\nb")
    writer.add_array("ints", [1, -2])
    writer.add_array("flags", [True, False])
    writer.add_tensor("w", np.ones((2, 3, 4), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile.open(path) as file:
        assert {key: file.metadata[key] for key in values} == values
        assert np.array_equal(np.asarray(file.metadata["ints"]), [1, -2])
        assert np.array_equal(np.asarray(file.metadata["flags"]), [True, False])
        assert (file.tensors["w"].shape, file.tensors["w"].nbytes) == ((2, 3, 4), 48)


def test_version_2_is_read_like_version_3(tmp_path: Path) -> None:
    with GgufFile.open(GOOD.but(version=2).write(tmp_path)) as file:
        assert list(file.tensors) == ["a", "b"]


def test_a_view_outlives_the_file(tmp_path: Path) -> None:
    file = GgufFile.open(GOOD.write(tmp_path))
    view = file.raw("a")
    file.close()
    assert view.tolist() == [0] * 32
    with pytest.raises(ValueError, match="closed"):
        file.raw("a")


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_clear_refusal(fault: str, tmp_path: Path) -> None:
    made, reason = FAULTS[fault]
    path = tmp_path / "made.gguf"
    path.write_bytes(bytes(made))
    with pytest.raises(ModelFileError, match=reason) as caught:
        GgufFile.open(path)
    assert str(path) in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize("length", range(0, len(bytes(GOOD)), 7))
def test_a_file_cut_short_anywhere_is_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "made.gguf"
    path.write_bytes(bytes(GOOD)[:length])
    with pytest.raises(ModelFileError, match=r"cannot read|damaged"):
        GgufFile.open(path)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "not a regular file"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.touch(), "empty"),
    ],
    ids=["missing", "folder", "pipe", "empty"],
)
def test_what_is_no_file_is_refused(make: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(ModelFileError, match=reason):
        GgufFile.open(path)


def test_a_refusal_does_not_repeat_a_hostile_name_at_length(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(add("x" * 60_000, 13, b"").write(tmp_path))
    assert len(caught.value.message) < 1000


def mutate(data: bytes, header_bytes: int, fields: list[int], value_fields: list[int], random: np.random.Generator) -> bytes:
    """Cut, flip, overwrite a length, a count or a value, or splice one part of the header over another."""
    broken = bytearray(data)
    kind = int(random.integers(6))
    if kind == 0:
        return data[: random.integers(len(data) if random.integers(2) else header_bytes)]
    if kind == 1:
        for place in random.integers(0, header_bytes, random.integers(1, 9)):
            broken[place] ^= 1 << random.integers(8)
    elif kind == 2:
        place = random.choice(fields)
        values = [0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, HUGE, int(random.integers(2**20))]
        broken[place : place + 8] = struct.pack("<Q", values[random.integers(len(values))])
    elif kind == 3:
        values = [0, 1, 2, 3, 7, 64, 2**20, 2**31, 0x7F800000, 0xFFC00000, 0xBF800000, int(random.integers(2**32))]
        place = random.choice(value_fields)
        broken[place : place + 4] = struct.pack("<I", values[random.integers(len(values))])
    elif kind == 4:
        source, target, count = random.integers(0, header_bytes, 3)
        count = min(count % 200, header_bytes - source, header_bytes - target)
        broken[target : target + count] = data[source : source + count]
    else:
        place, count = int(random.integers(0, header_bytes)), int(random.integers(1, 40))
        broken[place:place] = random.bytes(count) if random.integers(2) else b""
        del broken[place + count // 2 : place + count]
    return bytes(broken)


def length_fields(data: bytes, names: list[str]) -> list[int]:
    """Where the two counts and the lengths of the named strings stand."""
    return [8, 16, *(data.index(text(name)) for name in names)]


def small_shape(family: str) -> Shape:
    small = replace(SHAPES[family, "tiny"], layers=1, hidden=32, ffn=64, heads=2, kv_heads=1, head_dim=16, vocab=300)
    if small.experts:
        small = replace(small, experts=4, expert_ffn=32, shared_ffn=32 if small.shared_ffn else 0)
    if small.full_every:
        small = replace(small, layers=2, full_every=2, rope_dim=8, lin_dim=16)
    return small


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_1700_damaged_headers_of_each_family_open_or_are_refused(tmp_path: Path, family: str) -> None:
    """Each within seconds and without memory for what it merely claims; those that still make a model also run a step."""
    source = tmp_path / "source.gguf"
    write(str(source), family, small_shape(family), "F32", 1)
    data = source.read_bytes()
    with GgufFile.open(source) as file:
        header_bytes = min(info.offset for info in file.tensors.values())
        fields = length_fields(data, [*file.metadata, *file.tensors])
        # The family's own keys: their values, after the key and its type, decide what is built.
        value_fields = [data.index(text(key)) + len(text(key)) + 4 for key in file.metadata if key.startswith(f"{family}.")]
    random = np.random.default_rng(11)
    outcomes = {"refused": 0, "other family or shape": 0, "runs": 0}
    path = tmp_path / "broken.gguf"
    tracemalloc.start()
    for _ in range(1700):
        path.write_bytes(mutate(data, header_bytes, fields, value_fields, random))
        began = time.monotonic()
        outcomes[outcome(path)] += 1
        assert time.monotonic() - began < 30
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
    assert all(count > 20 for count in outcomes.values()), outcomes


def outcome(path: Path) -> str:
    try:
        file = GgufFile.open(path)
    except ModelFileError:
        return "refused"
    with file:
        try:
            config = load_config(file)
        except ModelFileError:
            return "other family or shape"
        lower(config)
        memory_budget(file, config, num_pages=1)
        backend = ReferenceBackend(file, num_pages=1)
    with suppress(EngineError):  # of logits that are not finite
        run(backend, np.array([1, 2, 3], np.int32), 3)
    return "runs"
